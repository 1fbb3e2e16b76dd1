"""Requests whose next token waits for the last one: they sit out steps, and hold up nobody."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.scheduler.step_plan import StepPlan

WITH_GRAMMAR = {"structured_outputs": {"json_object": True}}


def with_grammar(
    request_of: Any, name: str, prompt: Any = 4, max_tokens: int = 4, **more: Any
) -> Any:
    return request_of(name, prompt, max_tokens, params=WITH_GRAMMAR, **more)


def sampling(plan: StepPlan) -> list[str]:
    rows = [row.request.request_id for row in plan.decode_rows]
    return rows + [row.request.request_id for row in plan.prefill_rows if row.samples]


def test_a_row_with_a_grammar_waits_until_it_is_unblocked_and_others_do_not(drive, request_of):
    driver = drive(depth=1, num_decode_steps=4)
    held = driver.add(with_grammar(request_of, "g", [1] * 4, 3))
    driver.add(request_of("free", [2] * 4, 8))
    assert sampling(driver.turn()) == ["g", "free"]
    for _ in range(2):
        plan = driver.turn()
        assert sampling(plan) == ["free"]
        assert plan.num_steps == 1
    assert len(held.output_token_ids) == 1
    driver.scheduler.unblock("g", held.num_tokens)
    assert set(sampling(driver.turn())) == {"g", "free"}
    assert sampling(driver.turn()) == ["free"]
    driver.scheduler.unblock("g", held.num_tokens)
    assert set(sampling(driver.turn())) == {"g", "free"}
    driver.drain()


def test_unblocking_fewer_tokens_than_there_are_unblocks_nothing(drive, request_of):
    driver = drive()
    held = driver.add(with_grammar(request_of, "g", 4, 3))
    driver.turn()
    driver.scheduler.unblock("g", held.num_tokens - 1)
    driver.scheduler.unblock("nobody", 100)
    assert driver.turn() is None
    driver.scheduler.unblock("g", held.num_tokens)
    assert sampling(driver.turn()) == ["g"]
    driver.cancel("g")


def test_a_request_with_a_grammar_alone_plans_nothing_until_it_is_unblocked(drive, request_of):
    driver = drive(depth=1)
    held = driver.add(with_grammar(request_of, "g", 20, 3))
    # A chunk that samples nothing needs no mask; the first token's was there from the start.
    assert [driver.turn() is not None for _ in range(2)] == [True, True]
    assert driver.turn() is None
    assert len(held.output_token_ids) == 1
    driver.scheduler.unblock("g", held.num_tokens)
    assert driver.turn() is not None
    driver.cancel("g")


def test_one_that_was_preempted_in_flight_is_in_nobodys_way(drive, request_of):
    driver = drive({"num_pages": 9, "max_num_seqs": 3}, depth=1)
    driver.add(request_of("a", [1] * 8, 24))
    held = driver.add(with_grammar(request_of, "g", [2] * 8, 20))
    while held.metrics.num_preemptions == 0:
        driver.turn()
        driver.scheduler.unblock("g", held.num_tokens)
        driver.scheduler.check_integrity()
    late = driver.add(request_of("late", [3] * 2, 2))
    while not late.status.is_finished or driver.in_flight:
        driver.turn()
    driver.scheduler.unblock("g", held.num_tokens)
    while driver.scheduler.has_work:
        driver.turn()
        driver.scheduler.unblock("g", held.num_tokens)
    driver.check_ends()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 2), num_host=st.sampled_from([0, 12]))
@pytest.mark.parametrize("policy", ["fcfs", "slo", "mlfq"])
def test_whatever_the_delays_no_row_is_planned_before_it_is_unblocked(
    fakes, policy, seed, depth, num_host
):
    rng = random.Random(seed)
    limits = fakes.limits(num_pages=18, max_num_seqs=3, num_host_pages=num_host)
    driver = fakes.Driver(limits, depth=depth, policy=policy, num_decode_steps=4, watermark=0.0)
    delayed: list[tuple[str, int]] = []
    unblocked: dict[str, int] = {}
    for turn in range(600):
        if turn < 40 and rng.random() < 0.25:
            name = f"r{turn}"
            prompt = [rng.randrange(20) for _ in range(rng.randint(1, 20))]
            params = WITH_GRAMMAR if rng.random() < 0.6 else None
            request = fakes.request(
                name, prompt, rng.randint(1, 20), seed=rng.randrange(99), arrival_s=driver.now_s,
                eos=[3], params=params,
            )  # fmt: skip
            driver.add(request)
            unblocked[name] = request.num_tokens if request.has_grammar else 10**9
        known = {r.request_id: r.num_tokens for r in driver.requests}
        num_news = len(driver.news)
        plan = driver.turn()
        if plan is not None:
            assert all(unblocked[name] >= known[name] for name in sampling(plan))
            grammar_rows = [row for row in plan.decode_rows if row.request.has_grammar]
            assert all(row.max_new_tokens == 1 for row in grammar_rows)
            assert all(row.start == known[row.request.request_id] - 1 for row in grammar_rows)
            if grammar_rows:
                assert plan.num_steps == 1
        for news in driver.news[num_news:]:
            if news.request.has_grammar and not news.finished and news.new_token_ids:
                delayed.append((news.request.request_id, news.request.num_tokens))
        waits = plan is None and not driver.in_flight and not driver.device.transfers
        for item in list(delayed):
            if waits or rng.random() < 0.4:
                delayed.remove(item)
                driver.scheduler.unblock(*item)
                unblocked[item[0]] = item[1]
        driver.scheduler.check_integrity()
        driver.now_s += 0.01
        if turn >= 40 and not driver.scheduler.has_work:
            break
    assert not driver.scheduler.has_work, "no progress"
    driver.check_ends()
