"""Decode rows: positions, pages, limits, and several iterations in one dispatch."""

from __future__ import annotations

import pytest

from octavo.engine.scheduler.decode_planner import MOST_DISPATCH_S
from octavo.engine.scheduler.step_time_model import StepTimeModel


def quick_steps(row_s: float = 2e-5) -> StepTimeModel:
    """Iterations so short that their time bounds nothing; or, by the row, one that does."""
    return StepTimeModel((16, 64), fixed_s=0.001, decode_row_s=row_s)


def test_a_row_gains_a_page_just_when_it_needs_one(drive, request_of):
    driver = drive()
    driver.add(request_of("a", 3, 8))
    plans = []
    while (plan := driver.turn()) is not None:
        plans.append(plan)
    # Positions 0-2 are the prompt; 3 fits the first page, 4 needs the second, 8 the third.
    starts = [row.start for plan in plans for row in plan.decode_rows]
    assert starts == list(range(3, 10))
    gaining = [plan for plan in plans if plan.page_updates]
    assert [plan.page_updates for plan in gaining] == [((0, 1, 2),), ((0, 2, 3),)]
    assert [row.start for plan in gaining for row in plan.decode_rows] == [4, 8]


def test_a_row_is_never_planned_past_its_limit_while_steps_are_in_flight(drive, request_of):
    driver = drive(depth=3)
    request = driver.add(request_of("a", 4, 2))
    assert driver.plan() is not None
    assert driver.plan() is not None
    driver.scheduler.apply_plan()
    assert request.num_inflight_tokens == 2
    assert driver.plan() is None
    driver.drain()


def test_overlapped_steps_plan_ahead_of_commits(drive, request_of):
    driver = drive(depth=1)
    request = driver.add(request_of("a", 4, 5))
    driver.turn()
    second = driver.turn()
    assert second.decode_rows[0].start == 4
    assert request.num_computed_tokens == 5
    assert (len(request.output_token_ids), request.num_inflight_tokens) == (1, 1)
    driver.drain()


def test_steps_in_a_dispatch_are_the_largest_power_of_two_that_wastes_no_iteration(
    drive, request_of
):
    driver = drive(num_decode_steps=8)
    driver.add(request_of("a", 4, 8))
    plans = [driver.turn() for _ in range(4)]
    assert [plan.num_steps for plan in plans] == [1, 4, 2, 1]
    assert [sum(row.max_new_tokens for row in plan.decode_rows) for plan in plans[1:]] == [4, 2, 1]
    driver.drain()


def test_the_longest_row_sets_the_steps_and_shorter_rows_idle(drive, request_of):
    driver = drive(num_decode_steps=4)
    driver.add(request_of("a", [1] * 4, 3))
    driver.add(request_of("b", [2] * 4, 9))
    driver.turn()
    plan = driver.turn()
    assert plan.num_steps == 4
    assert [row.max_new_tokens for row in plan.decode_rows] == [2, 4]
    driver.drain()


def test_a_dispatch_has_one_step_while_any_prompt_advances(drive, request_of):
    driver = drive(num_decode_steps=8)
    driver.add(request_of("a", [1] * 4, 20))
    driver.turn()
    driver.add(request_of("b", [2] * 40, 2))
    plans = [driver.turn() for _ in range(4)]
    assert [plan.num_steps for plan in plans] == [1, 1, 1, 1]
    driver.drain()


def test_few_steps_and_none_past_a_limit_while_somebody_waits_for_a_row(drive, request_of):
    driver = drive({"max_num_seqs": 1}, num_decode_steps=8)
    driver.add(request_of("a", 4, 7))
    driver.add(request_of("b", 4, 1, arrival_s=1.0))
    plans = [driver.turn() for _ in range(5)]
    assert [plan.num_steps for plan in plans] == [1, 2, 2, 2, 1]
    driver.drain()


def test_pages_for_every_iteration_come_with_the_plan(drive, request_of):
    driver = drive(num_decode_steps=8, step_time=quick_steps())
    driver.add(request_of("a", 4, 20))
    driver.turn()
    plan = driver.turn()
    assert plan.num_steps == 8
    assert [index for _, index, _ in plan.page_updates] == [1, 2]
    driver.drain()


def test_steps_shrink_before_anybody_is_preempted(drive, request_of):
    driver = drive({"num_pages": 8}, num_decode_steps=8, enable_prefix_caching=False)
    driver.add(request_of("a", [1] * 12, 9))
    driver.add(request_of("b", [2] * 4, 9))
    driver.turn()
    plan = driver.turn()
    # 3 of 7 pages are left: 8 steps would take 2 for each row.
    assert plan.num_steps == 4
    assert len(plan.page_updates) == 2
    assert plan.preempted == ()
    driver.drain()


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 8), (2, 2), (4, 1)])
def test_a_dispatch_of_several_steps_is_over_soon(drive, request_of, num_rows, expected):
    driver = drive(num_decode_steps=8, step_time=quick_steps(row_s=MOST_DISPATCH_S / 6))
    if num_rows == 1:
        driver = drive(num_decode_steps=8, step_time=quick_steps(row_s=MOST_DISPATCH_S / 10))
    for index in range(num_rows):
        driver.add(request_of(f"r{index}", [index] * 4, 20))
    driver.turn()
    assert driver.turn().num_steps == expected
    driver.drain()


def test_limits_cap_the_steps(drive, request_of):
    driver = drive({"max_num_steps": 2}, num_decode_steps=8)
    driver.add(request_of("a", 4, 20))
    driver.turn()
    assert driver.turn().num_steps == 2
    driver.drain()
