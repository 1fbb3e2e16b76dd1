"""Clients that are sent away are told when there will be room for them, and find it then."""

from __future__ import annotations

import pytest

from octavo.engine.scheduler.refusals import MOST_PROMISES, PromisedReturns


def asked(request_of, number, **fields):
    return request_of(f"r{number}", [number % 1000, number // 1000, 7], 4, **fields)


def test_clients_refused_together_come_back_one_after_the_other(request_of):
    ledger = PromisedReturns()
    waits_s = [ledger.promise(asked(request_of, n), 0.0, 1.0, 0.5) for n in range(4)]
    assert waits_s == [1.0, 1.5, 2.0, 2.5]


def test_a_promise_is_kept_by_an_equal_request_at_its_time(request_of):
    ledger = PromisedReturns()
    ledger.promise(asked(request_of, 1), 0.0, 5.0, 0.5)
    assert not ledger.claim(asked(request_of, 1), 1.0)  # too early
    assert not ledger.claim(asked(request_of, 2), 5.0)
    assert not ledger.claim(asked(request_of, 1, tenant="other"), 5.0)
    assert ledger.claim(asked(request_of, 1), 5.0)
    assert not ledger.claim(asked(request_of, 1), 5.0)
    assert len(ledger) == 0


def test_promises_expire(request_of):
    ledger = PromisedReturns()
    ledger.promise(asked(request_of, 1), 0.0, 1.0, 0.5)
    assert ledger.claim(asked(request_of, 1), 2.9)
    ledger.promise(asked(request_of, 1), 10.0, 1.0, 0.5)
    assert not ledger.claim(asked(request_of, 1), 13.1)
    assert len(ledger) == 0


def test_work_counts_by_the_share_of_clients_that_come_back(request_of):
    ledger = PromisedReturns()
    for number in range(20):
        ledger.promise(asked(request_of, number), 0.0, 1.0, 0.1)
    assert ledger.work_before_s(10.0, 0.0) == 0.0  # nobody has come back yet
    assert ledger.promise(asked(request_of, 99), 0.0, 1.0, 0.1) == pytest.approx(3.0)
    for number in range(10):
        assert ledger.claim(asked(request_of, number), 1.0 + 0.1 * number)
    left_s = ledger.work_before_s(10.0, 2.0)
    assert 0.8 * 1.1 < left_s <= 1.1


def test_where_nobody_comes_back_nothing_is_kept_free(request_of):
    ledger = PromisedReturns()
    for turn in range(20):
        for number in range(10):
            ledger.promise(asked(request_of, number), 10.0 * turn, 0.5, 0.1)
    assert ledger.work_before_s(1e9, 191.0) == 0.0
    # Nor is anybody told to wait for those.
    assert ledger.promise(asked(request_of, 99), 191.0, 1.0, 0.1) < 1.05


def test_the_ledger_is_bounded(request_of):
    ledger = PromisedReturns()
    for number in range(MOST_PROMISES + 10):
        ledger.promise(asked(request_of, number), 0.0, 1.0, 0.1)
    assert len(ledger) == MOST_PROMISES
