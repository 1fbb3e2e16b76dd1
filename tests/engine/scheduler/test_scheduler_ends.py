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


def test_an_ended_request_does_not_end_a_new_one_with_its_id(drive, request_of):
    driver = drive()
    old = driver.add(request_of("a"))
    driver.cancel("a")
    new = request_of("a")
    driver.scheduler.add(new, 0.0)
    assert not driver.scheduler.finish(old, RequestStatus.STOPPED, "x", 0.0)
    assert driver.scheduler.get("a") is new


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


def test_a_failed_step_ends_its_requests_and_no_others(drive, request_of):
    driver = drive({"max_num_seqs": 1}, depth=1)
    lost = driver.add(request_of("lost"))
    kept = driver.add(request_of("kept", arrival_s=1.0))
    driver.plan()
    driver.plan()
    (first, _), error = driver.in_flight.popleft(), StepFailedError("no")
    assert driver.scheduler.fail(first, error, 2.0) == [lost]
    driver.ended(lost)
    assert (lost.status, lost.error) == (RequestStatus.FAILED, error)
    assert driver.commit() == []  # it was in the step after that, too
    driver.drain()
    assert kept.status is RequestStatus.LENGTH


def test_after_the_device_lost_its_state_everyone_else_starts_over(drive, request_of):
    driver = drive({"max_num_batched_tokens": 4, "max_prefill_rows": 1})
    lost = driver.add(request_of("lost", [1] * 4, 2, arrival_s=2.0))
    driver.turn()
    kept = driver.add(request_of("kept", [1] * 8, 6, arrival_s=1.0))
    driver.turn()
    driver.turn()
    plan = driver.scheduler.plan(0.0)
    for request in driver.scheduler.fail(plan, StepFailedError("no"), 0.0):
        driver.ended(request)
    driver.scheduler.forget_device_state()
    driver.device.lose_everything()
    assert driver.scheduler.load().num_cached_pages == 0
    assert lost.status.is_finished
    if not kept.status.is_finished:
        assert kept.status is RequestStatus.WAITING
    driver.drain()


def test_forgetting_the_device_state_names_the_preempted_in_the_next_plan(drive, request_of):
    driver = drive()
    request = driver.add(request_of("a"))
    driver.turn()
    driver.scheduler.forget_device_state()
    driver.device.lose_everything()
    assert request.status is RequestStatus.WAITING
    plan = driver.turn()
    assert plan.preempted == ("a",)
    assert (plan.prefill_rows[0].start, plan.prefill_rows[0].is_new) == (0, True)
    driver.drain()
