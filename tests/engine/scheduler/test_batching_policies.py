"""Batches: when one is begun, and who joins it."""

from __future__ import annotations

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.scheduler.policies import get_policy, policy_names


def admitted(plan):
    return [] if plan is None else [r.request.request_id for r in plan.prefill_rows if r.is_new]


def step(driver, now_s):
    driver.now_s = float(now_s)
    return admitted(driver.turn())


def test_a_static_batch_begins_when_full_and_the_next_after_its_end(drive, request_of):
    driver = drive({"max_num_batched_tokens": 64}, policy="static:batch_size=2")
    driver.add(request_of("a", 4, 2))
    assert step(driver, 100) == []
    driver.add(request_of("b", 4, 4, arrival_s=100.0))
    driver.add(request_of("c", 4, 1, arrival_s=100.0))
    driver.add(request_of("d", 4, 1, arrival_s=100.0))
    assert step(driver, 101) == ["a", "b"]
    while driver.scheduler.num_running:
        assert step(driver, 102) == []
    assert step(driver, 103) == ["c", "d"]
    driver.drain()


def test_a_dynamic_batch_begins_at_the_latest_after_its_timeout(drive, request_of):
    driver = drive({"max_num_batched_tokens": 64}, policy="dynamic:batch_size=3,timeout_s=2")
    driver.add(request_of("a", 4, 1, arrival_s=0.0))
    driver.add(request_of("b", 4, 1, arrival_s=1.0))
    assert step(driver, 1.9) == []
    assert step(driver, 2) == ["a", "b"]
    driver.drain()


def test_whole_prompts_wait_for_room_in_a_step(drive, request_of):
    driver = drive({"max_num_batched_tokens": 16}, policy="orca")
    for name in ("a", "b"):
        driver.add(request_of(name, 10, 3))
    assert step(driver, 0) == ["a"]
    plan = driver.turn()
    assert (len(plan.decode_rows), admitted(plan)) == (1, ["b"])
    driver.drain()


def test_prompts_may_have_a_step_for_themselves(drive, request_of):
    driver = drive({"max_num_batched_tokens": 16}, policy="orca:prefill=alone")
    driver.add(request_of("a", 10, 8))
    driver.turn()
    driver.add(request_of("b", 10, 8))
    plan = driver.turn()
    assert (len(plan.decode_rows), admitted(plan)) == (0, ["b"])
    assert len(driver.turn().decode_rows) == 2
    driver.drain()


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("lifo", "slo"),
        ("dynamic:size=3", "batch_size, timeout_s"),
        ("dynamic:batch_size=0", "at least 1"),
        ("dynamic:timeout_s=soon", "a number"),
        ("dynamic:timeout_s=nan", "a number"),
        ("fcfs:token_budget", "name:key=value"),
        ("slo:late=maybe", "reject or serve"),
        ("priority:a=1", "token_budget"),
    ],
)
def test_what_a_policy_does_not_take_is_refused_by_name(text, allowed):
    with pytest.raises(InvalidConfigError, match="scheduling_policy") as caught:
        get_policy(text)
    assert allowed in str(caught.value)


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_serves_a_plain_load_to_its_end(drive, request_of, name):
    driver = drive(policy=name)
    driver.tick_s = 0.1
    for index in range(8):
        driver.add(request_of(str(index), [index] * (3 + index), 5, arrival_s=index / 10))
    driver.drain()
