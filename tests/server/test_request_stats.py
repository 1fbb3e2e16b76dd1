"""What became of a request, counted once."""

from __future__ import annotations

import pytest

from octavo.engine.errors import DeadlineExceededError, OverloadedError
from octavo.engine.input.targets import Targets
from octavo.engine.output.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.engine.request import Priority
from octavo.server.request_stats import Histogram, RequestStats, RequestWatch

METRICS = RequestMetrics(arrival_s=10.0, first_scheduled_s=10.5, first_token_s=11.0)


def output(num_tokens: int, last_s: float, *reasons: str | None) -> RequestOutput:
    METRICS.last_token_s = last_s
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=[1, 2, 3], prompt_logprobs=None,
        outputs=[
            CompletionOutput(index, "", list(range(num_tokens)), finish_reason=reason)
            for index, reason in enumerate(reasons)
        ],
        finished=None not in reasons, metrics=METRICS,
    )  # fmt: skip


def watch(stats: RequestStats, *, is_delta: bool = True, **targets: float) -> RequestWatch:
    return RequestWatch(stats, Priority.HIGH, Targets(**targets), is_delta=is_delta)


def test_a_buckets_bound_belongs_to_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    histogram.observe(1.5, times=2)
    assert histogram.counts == [2, 4, 1]
    assert histogram.sum == 10.5


@pytest.mark.parametrize("is_delta", [True, False])
def test_a_requests_times_come_from_its_own_moments(is_delta):
    stats = RequestStats()
    request = watch(stats, is_delta=is_delta)
    request.saw(output(1, 11.0, None))
    request.saw(output(4 if is_delta else 5, 12.0, "stop"))
    assert (stats.ttft_s.sum, stats.e2e_s.sum) == (1.0, 2.0)
    assert (stats.queue_s.sum, stats.prefill_s.sum, stats.decode_s.sum) == (0.5, 0.5, 1.0)
    assert stats.tpot_s.sum == 0.25
    assert (sum(stats.itl_s.counts), stats.itl_s.sum) == (4, 1.0)
    assert (stats.prompt_tokens.sum, stats.generation_tokens.sum) == (3.0, 5.0)
    assert stats.ends == {"stop": 1}
    assert (stats.good_requests, stats.good_tokens) == ({"high": 1}, {"high": 5})


def test_errors_of_predicted_first_tokens_are_kept():
    stats = RequestStats()
    assert stats.prediction_error(0.5) == 0.0
    for number in range(1, 102):
        stats.predicted(1.0 + number / 100, 1.0)
    assert stats.prediction_error(0.5) == pytest.approx(0.51)
    assert stats.prediction_error(0.95) == pytest.approx(0.96)
    for _ in range(512):  # those of the last 512 requests
        stats.predicted(0.5, 1.0)
    assert stats.prediction_error(0.5) == stats.prediction_error(0.95) == 0.5
    METRICS.predicted_ttft_s = 1.25  # it came after 1 s
    watch(stats, is_delta=True).saw(output(1, 11.0, None))
    METRICS.predicted_ttft_s = None
    assert stats.prediction_error(0.0) == 0.25


def test_a_first_token_is_counted_when_it_comes():
    stats = RequestStats()
    request = watch(stats)
    request.saw(output(1, 11.0, None))
    assert (sum(stats.ttft_s.counts), stats.ttft_s.sum) == (1, 1.0)
    request.saw(output(1, 13.0, None))
    request.cancelled()
    assert sum(stats.ttft_s.counts) == 1


@pytest.mark.parametrize("num_completions", [1, 2])
def test_tokens_that_came_with_the_first_have_waited_for_each_other(num_completions):
    stats = RequestStats()
    watch(stats).saw(output(5, 12.0, *("stop",) * num_completions))
    assert (sum(stats.itl_s.counts), stats.itl_s.sum) == (4 * num_completions, 1.0)


def test_a_single_token_waits_for_none():
    stats = RequestStats()
    watch(stats).saw(output(1, 11.0, "length"))
    assert sum(stats.itl_s.counts) == 0


def test_each_target_is_met_or_missed_by_itself():
    stats = RequestStats()
    request = watch(stats, ttft_target_s=1.0, tpot_target_s=0.1, e2e_target_s=3.0)
    request.saw(output(5, 12.0, "length"))
    assert stats.slo == {
        ("high", "ttft", True): 1,
        ("high", "tpot", False): 1,
        ("high", "e2e", True): 1,
    }
    assert not stats.good_requests


def test_a_deadline_or_a_refusal_misses_every_target():
    stats = RequestStats()
    for error in (DeadlineExceededError("late"), OverloadedError("full", 1.0)):
        watch(stats, ttft_target_s=1.0).failed(error)
    assert stats.num_failed == 2
    assert stats.slo == {("high", "ttft", False): 2}
    assert not stats.ends


def test_a_client_that_leaves_says_nothing_about_targets():
    stats = RequestStats()
    request = watch(stats, ttft_target_s=1.0)
    request.saw(output(1, 11.0, None))
    request.cancelled()
    request.cancelled()
    assert stats.ends == {"cancelled": 1}
    assert not stats.slo


def test_leaving_after_the_end_changes_nothing():
    stats = RequestStats()
    request = watch(stats)
    request.saw(output(5, 12.0, "stop"))
    request.cancelled()
    request.failed(OverloadedError("full", 1.0))
    assert stats.ends == {"stop": 1}
    assert not stats.num_failed


def test_several_completions_end_as_the_worst_of_them():
    stats = RequestStats()
    watch(stats).saw(output(2, 12.0, "stop", "cancelled"))
    watch(stats).saw(output(2, 12.0, "stop", "length"))
    assert stats.ends == {"cancelled": 1, "length": 1}
    assert stats.generation_tokens.sum == 4.0
