"""Ends that come from outside: cancellation, stop strings, deadlines, failures."""

from __future__ import annotations

import pytest

from octavo.engine.errors import DeadlineExceededError, StepFailedError
from octavo.engine.request import RequestStatus


@pytest.mark.parametrize("num_turns", range(5))
@pytest.mark.parametrize("depth", [0, 1])
def test_cancel_in_any_state_frees_slot_and_pages_at_once(drive, request_of, num_turns, depth):
    driver = drive(depth=depth)
    request = driver.add(request_of("a", 20, 8))
    for _ in range(num_turns):
        driver.turn()
    assert driver.cancel("a") is request
    load = driver.scheduler.load()
    assert load.num_owned_pages == load.num_running == load.num_waiting == 0
    assert (request.status, request.slot) == (RequestStatus.CANCELLED, None)
    assert driver.cancel("a") is None
    driver.drain()


def test_cancel_can_end_otherwise(drive, request_of):
    driver = drive()
    request = driver.add(request_of("a"))
    error = StepFailedError("gone")
    driver.scheduler.cancel("a", 3.0, RequestStatus.FAILED, error)
    assert (request.status, request.error) == (RequestStatus.FAILED, error)
    assert request.metrics.finished_s == 3.0


def test_work_remains_until_the_steps_of_a_cancelled_request_are_committed(drive, request_of):
    driver = drive(depth=1)
    driver.add(request_of("a"))
    driver.turn()
    driver.cancel("a")
    assert not driver.scheduler.has_unfinished
    assert driver.scheduler.has_work
    assert driver.commit() == []
    assert not driver.scheduler.has_work


def test_an_unknown_id_cancels_nothing(drive):
    assert drive().scheduler.cancel("nobody", 0.0) is None


def test_a_stop_string_ends_once(drive, request_of):
    driver = drive(depth=1)
    request = driver.add(request_of("a"))
    driver.turn()
    driver.turn()
    finish = driver.scheduler.finish
    assert finish(request, RequestStatus.STOPPED, "\n\n", 1.0)
    assert not finish(request, RequestStatus.STOPPED, "\n\n", 1.0)
    assert (request.status, request.stop_reason) == (RequestStatus.STOPPED, "\n\n")
    assert driver.commit() == []


def test_deadlines_end_waiting_and_running_requests_once_they_have_passed(drive, request_of):
    driver = drive({"max_num_seqs": 1})
    running = driver.add(request_of("running", 4, 8, deadline_s=5.0))
    waiting = driver.add(request_of("waiting", 4, 8, deadline_s=6.0, arrival_s=1.0))
    patient = driver.add(request_of("patient", 4, 8, arrival_s=2.0))
    driver.turn()
    assert driver.scheduler.expire(5.0) == []
    assert driver.scheduler.expire(7.0) == [running, waiting]
    assert driver.scheduler.expire(8.0) == []
    for request in (running, waiting):
        assert request.status is RequestStatus.FAILED
        assert isinstance(request.error, DeadlineExceededError)
    assert not patient.status.is_finished


def test_a_finished_request_does_not_expire(drive, request_of):
    driver = drive()
    for i in range(100):  # enough for stale entries to be swept
        driver.add(request_of(str(i), 4, 1, deadline_s=5.0))
        driver.drain()
    assert driver.scheduler.expire(9.0) == []


def lose(driver):
    driver.in_flight.clear()
    driver.scheduler.recover(driver.now_s)
    driver.device.lose_everything()


def test_after_a_failed_step_everyone_goes_on_from_the_tokens_they_have(drive, request_of):
    driver = drive({"max_num_batched_tokens": 4, "max_prefill_rows": 1})
    first = driver.add(request_of("first", [1] * 4, 6, arrival_s=2.0))
    driver.turn()
    second = driver.add(request_of("second", [1] * 8, 6, arrival_s=1.0))
    driver.turn()
    driver.turn()
    said = list(first.output_token_ids)
    assert said
    lose(driver)
    assert driver.scheduler.load().num_cached_pages == 0
    assert first.status is second.status is RequestStatus.WAITING
    assert first.output_token_ids == said
    driver.drain()
    assert first.output_token_ids[: len(said)] == said
    assert first.status is second.status is RequestStatus.LENGTH


def test_only_the_named_are_planned_until_all_are_let_go(drive, request_of):
    driver = drive()
    tried, held = driver.add(request_of("tried", 4, 8)), driver.add(request_of("held", 4, 8))
    driver.scheduler.only(["tried"])
    later = driver.add(request_of("later", 4, 2))
    plan = driver.turn()
    assert [row.request for row in plan.prefill_rows] == [tried]
    assert driver.scheduler.num_waiting == 2
    driver.scheduler.check_integrity()
    driver.cancel("later")
    assert later.status is RequestStatus.CANCELLED
    driver.scheduler.only(None)
    assert held in [row.request for row in driver.turn().prefill_rows]
    driver.drain()


def test_held_requests_expire(drive, request_of):
    driver = drive()
    held = driver.add(request_of("held", 4, 8, deadline_s=5.0))
    driver.scheduler.only([])
    assert driver.scheduler.plan(0.0) is None
    assert driver.scheduler.expire(6.0) == [held]
    driver.scheduler.check_integrity()


@pytest.mark.parametrize(
    "ruin",
    [
        lambda table: table.kv.pool._free.append(table.kv.pool._free[0]),
        lambda table: table.rows.free_slots.append(0),
        lambda table: table.waiting.entries.clear(),
    ],
    ids=["pages", "slots", "queue"],
)
def test_books_in_disorder_are_made_anew_and_nobody_is_lost(drive, request_of, ruin):
    driver = drive({"max_num_seqs": 2})
    requests = [driver.add(request_of(str(i), 5, 6, deadline_s=1e6)) for i in range(4)]
    for _ in range(3):
        driver.turn()
    num_preemptions = driver.scheduler.load().num_preemptions
    ruin(driver.scheduler._table)
    lose(driver)
    assert driver.scheduler.num_rebuilds == 1
    driver.scheduler.check_integrity()
    assert driver.scheduler.load().num_preemptions >= num_preemptions
    driver.drain()
    assert all(request.status is RequestStatus.LENGTH for request in requests)


def test_forgetting_the_device_state_names_the_preempted_in_the_next_plan(drive, request_of):
    driver = drive()
    request = driver.add(request_of("a"))
    driver.turn()
    lose(driver)
    assert request.status is RequestStatus.WAITING
    plan = driver.turn()
    assert plan.preempted == ("a",)
    assert (plan.prefill_rows[0].start, plan.prefill_rows[0].is_new) == (0, True)
    driver.drain()
