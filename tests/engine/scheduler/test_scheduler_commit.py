"""What becomes of a step's tokens."""

from __future__ import annotations

import pytest

from octavo.engine.request import RequestStatus
from octavo.engine.scheduler.step_plan import RowTokens, StepResult, TokenScore


def start(drive, request_of, **request_args):
    """A driver whose one request is about to get its first token."""
    driver = drive()
    request = driver.add(request_of("a", 4, **request_args))
    return driver, request, driver.scheduler.plan(0.0)


def commit(driver, plan, *rows):
    return list(driver.scheduler.commit(plan, StepResult(rows=rows), 1.0))


def test_an_end_of_sequence_token_stops_without_a_reason(drive, request_of):
    driver, request, plan = start(drive, request_of, eos=[9])
    (news,) = commit(driver, plan, RowTokens((9,)))
    assert news.finished
    assert news.new_token_ids == (9,)
    assert (request.status, request.stop_reason) == (RequestStatus.STOPPED, None)


def test_a_stop_token_of_the_requests_own_is_the_reason(drive, request_of):
    driver, request, plan = start(drive, request_of, params={"stop_token_ids": [9]})
    commit(driver, plan, RowTokens((9,)))
    assert (request.status, request.stop_reason) == (RequestStatus.STOPPED, 9)


def test_a_stop_token_before_min_tokens_does_not_stop(drive, request_of):
    driver, request, plan = start(drive, request_of, eos=[9], params={"min_tokens": 2})
    assert not commit(driver, plan, RowTokens((9,)))[0].finished
    assert not commit(driver, driver.scheduler.plan(0.0), RowTokens((9,)))[0].finished
    assert commit(driver, driver.scheduler.plan(0.0), RowTokens((9,)))[0].finished
    assert request.output_token_ids == [9, 9, 9]


def test_the_length_limit_ends_and_a_stop_token_there_counts_as_a_stop(drive, request_of):
    driver, request, plan = start(drive, request_of, max_tokens=1)
    commit(driver, plan, RowTokens((5,)))
    assert request.status is RequestStatus.LENGTH
    driver, request, plan = start(drive, request_of, max_tokens=1, eos=[5])
    commit(driver, plan, RowTokens((5,)))
    assert request.status is RequestStatus.STOPPED


def test_tokens_after_a_stop_are_cut_off_with_their_logprobs(drive, request_of):
    driver = drive(num_decode_steps=4)
    request = driver.add(request_of("a", 4, 9, eos=[9], params={"logprobs": 0}))
    score = (TokenScore(-1.0, 1),)
    commit(driver, driver.scheduler.plan(0.0), RowTokens((1,), score))
    plan = driver.scheduler.plan(0.0)
    assert plan.num_steps == 4
    (news,) = commit(driver, plan, RowTokens((1, 9, 1, 1), score * 4))
    assert news.new_token_ids == (1, 9)
    assert news.logprobs == score * 2
    assert request.output_token_ids == [1, 1, 9]


def test_a_row_that_lives_on_must_have_emitted_all_it_was_planned_to(drive, request_of):
    driver = drive(num_decode_steps=4)
    driver.add(request_of("a", 4, 9))
    commit(driver, driver.scheduler.plan(0.0), RowTokens((1,)))
    plan = driver.scheduler.plan(0.0)
    with pytest.raises(AssertionError):
        commit(driver, plan, RowTokens((1, 1)))
    driver.cancel("a")


def test_results_come_in_dispatch_order(drive, request_of):
    driver, _, _ = start(drive, request_of)
    second = driver.scheduler.plan(0.0)
    with pytest.raises(AssertionError, match="order"):
        commit(driver, second, RowTokens((1,)))


def test_a_chunk_without_a_token_is_no_news(drive, request_of):
    driver = drive()
    driver.add(request_of("a", 20))
    driver.plan()
    assert driver.commit() == []
    driver.drain()


def test_rows_of_a_stopped_request_in_the_next_step_are_dropped(drive, request_of, fakes):
    driver = drive(depth=1)
    other = driver.add(request_of("other", [1] * 4, 8))
    request = request_of("a", [2] * 4, 8)
    request.eos_token_ids = (fakes.oracle(request)[1],)
    driver.add(request)
    driver.turn()
    driver.turn()
    driver.turn()
    assert request.status is RequestStatus.STOPPED
    assert [row.request for row in driver.in_flight[-1][0].decode_rows] == [other, request]
    assert [news.request for news in driver.commit()] == [other]
    driver.drain()


def test_a_slot_given_on_before_the_commit_confuses_nobody(drive, request_of):
    driver = drive({"max_num_seqs": 1}, depth=1)
    first = driver.add(request_of("first", [1] * 4, 8))
    driver.turn()
    driver.cancel("first")
    second = driver.add(request_of("second", [2] * 4, 3))
    plan = driver.plan()
    assert plan.prefill_rows[0].slot == 0
    assert driver.commit() == []  # the first one's step
    assert first.output_token_ids == []
    driver.commit()
    assert len(second.output_token_ids) == 1
    driver.drain()


def test_prompt_logprobs_are_handed_out_once_though_the_prompt_is_computed_twice(drive, request_of):
    driver = drive({"num_pages": 6, "max_num_batched_tokens": 12})
    driver.add(request_of("first", [1] * 8, 9, arrival_s=1.0))
    last = request_of("last", [2] * 8, 4, arrival_s=2.0, params={"prompt_logprobs": 0})
    driver.add(last)
    driver.drain()
    assert last.metrics.num_preemptions == 1
    assert [score.logprob for score in driver.prompt_scores["last"]] == [1, 2, 3, 4, 5, 6, 7]
