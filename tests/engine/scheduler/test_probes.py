"""Probes: who becomes one, what they may take, and what they show."""

from __future__ import annotations

import pytest

from octavo.engine.errors import UnattainableTargetError
from octavo.engine.request import RequestStatus
from octavo.engine.scheduler.refusals import MOST_SHARE, ONE_IN, Probes, wilson_interval
from octavo.engine.scheduler.step_time_model import StepTimeModel


def candidates(request_of, count, **fields):
    """Requests that a hash of their ids makes candidates."""
    found = []
    for number in range(100 * ONE_IN * count):
        request = request_of(f"{number}", [1] * 8, 4, **fields)
        if Probes().takes(request, 10**9):
            found.append(request)
    return found[:count]


def test_about_one_in_eight_is_a_candidate(request_of):
    requests = [request_of(f"x-{n}", [1] * 8, 4) for n in range(4000)]
    taken = sum(Probes().takes(request, 10**9) for request in requests)
    assert 0.8 < taken / (4000 / ONE_IN) < 1.2


def test_probes_take_at_most_a_hundredth_of_all_tokens(request_of):
    probes = Probes()
    first, second, third = candidates(request_of, 3)
    needed = int(first.max_total_tokens / MOST_SHARE)
    assert not probes.takes(first, needed - 1)
    assert probes.takes(first, needed)
    assert not probes.takes(second, needed)  # the first may still take all of that
    first.output_token_ids.append(1)
    first.status = RequestStatus.STOPPED
    first.metrics.first_token_s = 0.1
    probes.look()
    assert probes.load().num_tokens == first.num_tokens < first.max_total_tokens
    assert not probes.takes(second, needed)
    assert probes.takes(third, int((first.num_tokens + third.max_total_tokens) / MOST_SHARE) + 1)


def test_a_probe_that_was_on_time_is_a_wrong_refusal(request_of):
    probes = Probes()
    ends = {0.5: True, 1.5: False}
    for request, first_s in zip(candidates(request_of, 2, ttft_target_s=1.0), ends, strict=True):
        assert probes.takes(request, 10**9)
        request.metrics.first_token_s = first_s
        request.output_token_ids.append(1)
        request.status = RequestStatus.LENGTH
    probes.look()
    assert (probes.load().num_probes, probes.load().num_wrong) == (2, 1)


def test_a_probe_whose_client_left_says_nothing(request_of):
    probes = Probes()
    (request,) = candidates(request_of, 1, ttft_target_s=1.0)
    probes.takes(request, 10**9)
    request.status = RequestStatus.CANCELLED
    probes.look()
    assert probes.load().num_probes == len(probes) == 0


LIMITS = {"max_num_batched_tokens": 64, "num_pages": 257, "token_edges": (64,)}


def test_a_probe_is_served_to_its_end_though_it_is_hopeless(drive, request_of):
    slow = StepTimeModel((64,), fixed_s=10.0, decode_row_s=0.0, prefill_token_s=0.0)
    driver = drive(LIMITS, policy="slo", step_time=slow)
    (probe,) = candidates(request_of, 1, ttft_target_s=1.0)
    with pytest.raises(UnattainableTargetError):  # nothing has been computed yet
        driver.add(probe)
    for number in range(60):
        driver.add(request_of(f"plain{number}", [2] * 60, 30))
        driver.drain()
    driver.add(probe)
    driver.now_s = 5.0  # no step took any time: the device of this test has no clock
    driver.drain()
    assert probe.status is RequestStatus.LENGTH
    assert driver.scheduler.refusals.probes.load().num_probes == 1
    driver.scheduler.check_integrity()


def test_a_probe_of_the_queue_is_neither_rejected_nor_put_back(drive, request_of):
    fast = StepTimeModel((64,), fixed_s=0.01, decode_row_s=0.0, prefill_token_s=0.0)
    driver = drive({**LIMITS, "max_num_seqs": 1}, policy="slo", step_time=fast)
    for number in range(60):
        driver.add(request_of(f"plain{number}", [2 + number] * 60, 30))
        driver.drain()
    (probe,) = candidates(request_of, 1, ttft_target_s=1.0)
    other = request_of("no-candidate", [3] * 8, 4, ttft_target_s=1.0)
    assert not Probes().takes(other, 10**9)
    driver.add(request_of("running", [1] * 8, 20))
    driver.turn()
    driver.add(probe)
    driver.add(other)
    driver.now_s = 1.5  # both are hopeless
    driver.turn()
    assert other.status is RequestStatus.REJECTED
    entry = driver.scheduler._table.live.entry(probe)
    assert not entry.is_demoted
    driver.scheduler.check_integrity()
    driver.drain()
    assert probe.status is RequestStatus.LENGTH
    load = driver.scheduler.refusals.probes.load()
    assert (load.num_probes, load.num_wrong) == (1, 0)


def test_the_interval_of_a_share():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = wilson_interval(5, 100)
    assert (low, high) == (pytest.approx(0.0215, abs=1e-3), pytest.approx(0.1118, abs=1e-3))
    assert wilson_interval(0, 50)[0] == 0.0
    assert wilson_interval(50, 50)[1] == pytest.approx(1.0)
