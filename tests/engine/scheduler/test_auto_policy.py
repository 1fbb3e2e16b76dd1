"""The default policy: first come, first served until somebody has a target."""

from __future__ import annotations

import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.errors import UnattainableTargetError
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_time_model import StepTimeModel


def begun(driver):
    return [r.request.request_id for p in driver.plans for r in p.prefill_rows if r.is_new]


@pytest.fixture
def one_row(drive):
    return drive(
        {"max_num_seqs": 1},
        policy="auto",
        step_time=StepTimeModel((16,), fixed_s=0.05, decode_row_s=0.0, prefill_token_s=0.0),
        enable_prefix_caching=False,
    )


def test_it_is_the_default(fakes):
    assert EngineConfig().scheduling_policy == "auto"
    assert Scheduler(fakes.limits()).policy.name == "auto"


def test_without_targets_requests_are_served_as_they_come(one_row, request_of):
    for name, length in (("a", 30), ("b", 20), ("c", 4)):
        one_row.add(request_of(name, [ord(name)] * length, 3, arrival_s=float(ord(name) - 97)))
    one_row.drain()
    assert begun(one_row) == ["a", "b", "c"]
    assert one_row.scheduler.policy.name == "auto"


def test_a_target_makes_it_slo_for_all_who_wait_and_its_end_fcfs_again(one_row, request_of):
    for name in ("a", "b"):
        one_row.add(request_of(name, [ord(name)] * 8, 3, arrival_s=0.0))
    one_row.turn()
    one_row.add(request_of("urgent", [1] * 4, 3, arrival_s=0.0, e2e_target_s=20.0))
    one_row.turn()
    assert one_row.scheduler.policy.name == "slo"
    while one_row.scheduler.get("urgent") is not None:
        one_row.turn()
    # Before "b", which came first and was promised nothing.
    assert "b" not in begun(one_row)
    one_row.turn()
    assert one_row.scheduler.policy.name == "auto"
    one_row.drain()
    assert begun(one_row)[-1] in "ab"


def test_a_deadline_alone_is_no_target(one_row, request_of):
    one_row.add(request_of("bounded", [1] * 8, 30, arrival_s=0.0, deadline_s=0.01))
    one_row.turn()
    assert one_row.scheduler.policy.name == "auto"


def test_the_hopeless_are_refused_at_the_door_from_the_first_on(one_row, request_of):
    with pytest.raises(UnattainableTargetError):
        one_row.add(request_of("late", [1] * 8, 30, arrival_s=0.0, e2e_target_s=0.01))
    one_row.turn()
    assert one_row.scheduler.policy.name == "auto"
