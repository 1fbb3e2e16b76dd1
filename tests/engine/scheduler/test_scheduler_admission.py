"""Who is let in, who is refused, and in which order."""

from __future__ import annotations

import pytest

from octavo.engine.errors import (
    DeadlineExceededError,
    InvalidConfigError,
    InvalidRequestError,
)
from octavo.engine.request import Priority, RequestStatus
from octavo.engine.scheduler.scheduler import Scheduler


def admitted(plan):
    return [row.request.request_id for row in plan.prefill_rows if row.is_new]


@pytest.mark.parametrize(
    ("limits", "request_args", "field"),
    [
        ({"max_model_len": 12}, {"prompt": 12, "max_tokens": 1}, "prompt_token_ids"),
        ({"max_model_len": 12}, {"prompt": 8, "max_tokens": 5}, "max_tokens"),
        ({"num_pages": 4}, {"prompt": 8, "max_tokens": 6}, "max_tokens"),
        ({"max_pages_per_seq": 3}, {"prompt": 8, "max_tokens": 6}, "max_tokens"),
    ],
)
def test_what_can_never_fit_is_refused_by_field(drive, request_of, limits, request_args, field):
    driver = drive(limits)
    with pytest.raises(InvalidRequestError) as caught:
        driver.scheduler.add(request_of(**request_args), 0.0)
    assert caught.value.field == field
    assert not driver.scheduler.has_unfinished


@pytest.mark.parametrize(
    ("limits", "request_args"),
    [
        ({"max_model_len": 12}, {"prompt": 8, "max_tokens": 4}),
        # The last token's KV is never written: 13 tokens fit 3 pages of 4.
        ({"num_pages": 4}, {"prompt": 8, "max_tokens": 5}),
        ({"max_pages_per_seq": 3}, {"prompt": 8, "max_tokens": 5}),
    ],
)
def test_what_just_fits_is_served(drive, request_of, limits, request_args):
    driver = drive(limits, watermark=0.5)
    driver.add(request_of(**request_args))
    driver.drain()


def test_without_chunked_prefill_a_prompt_must_fit_a_step(drive, request_of):
    driver = drive({"max_num_batched_tokens": 16}, enable_chunked_prefill=False)
    with pytest.raises(InvalidRequestError, match="max_num_batched_tokens"):
        driver.scheduler.add(request_of(prompt=17), 0.0)
    driver.add(request_of(prompt=16))
    assert [row.num_tokens for row in driver.turn().prefill_rows] == [16]


@pytest.mark.parametrize("policy", ["fcfs:token_budget=8", "sjf:token_budget=1"])
def test_a_prompt_that_is_not_split_exceeds_the_budget_of_a_policy_by_itself(
    drive, request_of, policy
):
    limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    off = {"enable_chunked_prefill": False, "enable_prefix_caching": False}
    driver = drive(limits, **off, policy=policy)
    for request_id, prompt in (("short", 4), ("long", 16), ("next", 6)):
        driver.add(request_of(request_id, prompt, max_tokens=2))
    steps = []
    for _ in range(20):
        plan = driver.turn()
        if plan is not None and plan.prefill_rows:
            steps.append([row.num_tokens for row in plan.prefill_rows])
    assert sorted(steps) == [[4], [6], [16]]
    assert not driver.scheduler.has_unfinished


def test_a_past_deadline_is_refused(drive, request_of):
    with pytest.raises(DeadlineExceededError):
        drive().scheduler.add(request_of(deadline_s=1.0), 1.5)


def test_limits_must_let_every_row_decode(fakes):
    with pytest.raises(InvalidConfigError, match="max_num_batched_tokens"):
        Scheduler(fakes.limits(max_num_seqs=17, max_num_batched_tokens=16))
    with pytest.raises(InvalidConfigError, match="scheduling_policy"):
        Scheduler(fakes.limits(), policy="lifo")


def test_requests_are_admitted_by_arrival_whatever_the_order_of_add(drive, request_of):
    driver = drive()
    for request_id, arrival_s in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        driver.add(request_of(request_id, 4, arrival_s=arrival_s))
    assert admitted(driver.turn()) == ["a", "b", "c"]


def test_priority_comes_before_arrival(drive, request_of):
    driver = drive({"max_num_seqs": 2}, policy="priority")
    for index, priority in enumerate((Priority.LOW, Priority.NORMAL, Priority.REALTIME)):
        driver.add(request_of(priority.name, 4, arrival_s=float(index), priority=priority))
    assert admitted(driver.turn()) == ["REALTIME", "NORMAL"]


def test_rows_tokens_and_prefill_rows_bound_admission(drive, request_of):
    for limits, expected in (
        ({"max_num_seqs": 2}, 2),
        ({"max_prefill_rows": 3}, 3),
        ({"max_num_batched_tokens": 8}, 2),
    ):
        driver = drive(limits)
        for i in range(5):
            driver.add(request_of(str(i), [i] * 4, arrival_s=float(i)))
        assert len(admitted(driver.turn())) == expected
        driver.drain()


def test_nobody_overtakes_one_that_lacks_pages(drive, request_of):
    driver = drive({"num_pages": 9})
    driver.add(request_of("running", [1] * 16, 8))
    driver.turn()
    driver.add(request_of("large", [2] * 20, arrival_s=1.0))
    driver.add(request_of("small", [3] * 4, arrival_s=2.0))
    assert admitted(driver.turn()) == []
    assert driver.scheduler.num_waiting == 2
    driver.drain()


def test_the_watermark_keeps_pages_from_admission_but_not_from_an_idle_engine(drive, request_of):
    driver = drive({"num_pages": 11}, watermark=0.3)
    driver.add(request_of("a", [1] * 16, 2))
    assert admitted(driver.turn()) == ["a"]  # 4 of 10 pages
    driver.add(request_of("b", [2] * 16, 2))
    assert admitted(driver.turn()) == []  # would leave 2, and 3 must stay
    driver.drain()
    driver.add(request_of("c", [3] * 39, 2))
    assert admitted(driver.turn()) == ["c"]  # all 10
    driver.drain()


def test_chunks_stop_at_page_boundaries_and_decode_rows_go_first(drive, request_of):
    driver = drive({"max_num_batched_tokens": 11})
    driver.add(request_of("a", [1] * 3, 9))
    driver.turn()
    driver.add(request_of("b", [2] * 20, 2))
    plans = [driver.turn() for _ in range(3)]
    assert [len(plan.decode_rows) for plan in plans] == [1, 1, 1]
    assert [(row.start, row.num_tokens) for plan in plans for row in plan.prefill_rows] == [
        (0, 8),
        (8, 8),
        (16, 4),
    ]
    assert [plan.prefill_rows[0].samples for plan in plans] == [False, False, True]
    driver.drain()


def test_a_step_too_small_for_a_page_still_advances_the_prompt(drive, request_of):
    driver = drive({"max_num_batched_tokens": 4, "page_size": 16})
    driver.add(request_of("a", 10))
    assert [driver.turn().prefill_rows[0].num_tokens for _ in range(3)] == [4, 4, 2]
    driver.drain()


def test_a_new_row_gets_the_pages_of_all_its_tokens_at_once(drive, request_of):
    driver = drive({"max_num_batched_tokens": 8})
    driver.add(request_of("a", 18))
    first, second = driver.turn(), driver.turn()
    assert len(first.prefill_rows[0].page_ids) == 5
    assert second.prefill_rows[0].page_ids == ()
    assert second.page_updates == ()


def test_first_scheduled_and_first_token_are_noted(drive, request_of):
    driver = drive()
    request = driver.add(request_of("a", 4, 3, arrival_s=1.0))
    assert request.status is RequestStatus.WAITING
    driver.now_s = 2.0
    driver.plan()
    assert request.status is RequestStatus.RUNNING
    driver.now_s = 3.0
    driver.commit()
    driver.now_s = 4.0
    driver.drain()
    metrics = request.metrics
    assert (metrics.arrival_s, metrics.first_scheduled_s, metrics.ttft_s) == (1.0, 2.0, 2.0)
    assert (metrics.last_token_s, metrics.finished_s) == (4.0, 4.0)
