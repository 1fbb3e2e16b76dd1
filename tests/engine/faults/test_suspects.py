"""The search for the request that makes steps fail, with steps played by hand."""

from __future__ import annotations

import math

import pytest

from octavo.engine.faults.suspects import TOKENS_TO_PASS, Suspects
from octavo.engine.request import Request, RequestStatus
from tests.engine.made_requests import make_request


def request_of(number: int) -> Request:
    return make_request(str(number), 1, max_tokens=100)


def play(requests: list[Request], guilty: set[str], max_failures: int = 1000) -> tuple[list, int]:
    """Steps of everybody who may run, until nobody is on trial; (those found, failed steps)."""
    suspects, found, num_failures = Suspects(), [], 0
    while True:
        may_run = suspects.may_run
        if may_run is None and num_failures:
            live = [r for r in requests if not r.status.is_finished]
            if guilty.isdisjoint(r.request_id for r in live):
                return found, num_failures
        step = [
            r
            for r in requests
            if not r.status.is_finished and (may_run is None or r.request_id in may_run)
        ]
        if guilty.isdisjoint(r.request_id for r in step):
            for request in step:
                request.output_token_ids.append(0)
            suspects.settle()
            continue
        num_failures += 1
        assert num_failures <= max_failures
        culprit = suspects.blame(step)
        if culprit is not None:
            culprit.status = RequestStatus.FAILED
            found.append(culprit.request_id)
        suspects.settle()


@pytest.mark.parametrize("num_requests", [1, 2, 3, 7, 64, 256])
def test_one_guilty_request_is_found_alone_and_soon(num_requests: int) -> None:
    for guilty in {0, num_requests // 2, num_requests - 1}:
        requests = [request_of(n) for n in range(num_requests)]
        found, num_failures = play(requests, {str(guilty)})
        assert found == [str(guilty)]
        assert num_failures <= 2 + math.ceil(math.log2(num_requests))


def test_several_guilty_requests_are_all_found_and_nobody_else() -> None:
    requests = [request_of(n) for n in range(33)]
    guilty = {"3", "4", "20", "32"}
    found, _ = play(requests, guilty)
    assert set(found) == guilty


def test_a_fault_that_does_not_come_again_is_nobodys() -> None:
    suspects, requests = Suspects(), [request_of(n) for n in range(4)]
    assert suspects.blame(requests) is None
    assert suspects.may_run == ["0", "1", "2", "3"]
    for _ in range(TOKENS_TO_PASS):
        assert suspects.is_trying
        for request in requests:
            request.output_token_ids.append(0)
        suspects.settle()
    assert suspects.may_run is None


def test_a_suspect_that_ends_otherwise_holds_nobody_up() -> None:
    suspects, requests = Suspects(), [request_of(n) for n in range(2)]
    suspects.blame(requests)
    for request in requests:
        request.status = RequestStatus.CANCELLED
    assert suspects.settle()
    assert not suspects.is_trying


def test_a_failure_without_suspects_blames_nobody() -> None:
    suspects = Suspects()
    assert suspects.blame([]) is None
    assert suspects.may_run is None


def test_an_untried_suspect_does_not_run_beside_those_on_trial() -> None:
    suspects, requests = Suspects(), [request_of(n) for n in range(4)]
    suspects.blame(requests)
    suspects.blame(requests)
    assert suspects.may_run == ["0", "1"]
