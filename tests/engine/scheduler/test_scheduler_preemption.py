"""Too few pages: who gives way, what it keeps, and when it comes back."""

from __future__ import annotations

import dataclasses

import pytest

from octavo.engine.request import Priority, RequestStatus
from octavo.engine.scheduler.policies import get_policy
from octavo.engine.scheduler.policies.baselines import by_arrival
from octavo.engine.scheduler.policy import Policy

TIGHT = {"num_pages": 5, "max_num_batched_tokens": 32}
"""Four pages of four tokens: two requests of eight fill them."""


def fill(drive, request_of, **driver_args):
    """Two running requests that need a third page each in the next plan, and none is left."""
    driver = drive(TIGHT, enable_prefix_caching=False, **driver_args)
    first = driver.add(request_of("first", [1] * 8, 6, arrival_s=1.0))
    last = driver.add(request_of("last", [2] * 8, 6, arrival_s=2.0))
    driver.turn()
    return driver, first, last


def test_the_last_in_the_order_gives_way_and_waits_in_its_place(drive, request_of):
    driver, first, last = fill(drive, request_of)
    driver.add(request_of("later", [3] * 4, 2, arrival_s=3.0))
    plan = driver.turn()
    assert plan.preempted == ("last",)
    assert [row.request for row in plan.decode_rows] == [first]
    assert (last.status, last.slot, last.num_computed_tokens) == (RequestStatus.WAITING, None, 0)
    assert last.metrics.num_preemptions == 1
    driver.drain()
    new = [row.request.request_id for p in driver.plans for row in p.prefill_rows if row.is_new]
    assert new[:4] == ["first", "last", "last", "later"]


def test_low_priority_gives_way_whenever_it_came(drive, request_of):
    driver = drive(TIGHT, enable_prefix_caching=False, policy="priority")
    driver.add(request_of("low", [1] * 8, 6, arrival_s=1.0, priority=Priority.LOW))
    driver.add(request_of("high", [2] * 8, 6, arrival_s=2.0, priority=Priority.HIGH))
    driver.turn()
    assert driver.turn().preempted == ("low",)
    driver.drain()


def test_the_row_in_need_may_be_the_victim_itself(drive, request_of):
    driver = drive({**TIGHT, "num_pages": 6}, enable_prefix_caching=False)
    first = driver.add(request_of("first", [1] * 9, 4, arrival_s=1.0))
    last = driver.add(request_of("last", [2] * 8, 4, arrival_s=2.0))
    driver.turn()
    plan = driver.turn()
    assert plan.preempted == ("last",)
    assert [row.request for row in plan.decode_rows] == [first]
    assert last.slot is None
    driver.drain()


def test_tokens_in_flight_at_preemption_are_kept(drive, request_of):
    driver, _, last = fill(drive, request_of, depth=1)
    plan = driver.plan()
    assert plan.preempted == ("last",)
    assert (last.num_inflight_steps, last.output_token_ids) == (1, [])
    driver.commit()
    assert len(last.output_token_ids) == 1
    assert last.status is RequestStatus.WAITING
    driver.drain()


def test_a_preempted_request_may_finish_while_it_waits(drive, request_of):
    driver = drive(TIGHT, enable_prefix_caching=False, depth=1)
    driver.add(request_of("first", [1] * 8, 6, arrival_s=1.0))
    stopper = request_of("last", [2] * 8, 6, arrival_s=2.0)
    stopper.eos_token_ids = tuple(range(23))  # whatever comes first ends it
    last = driver.add(stopper)
    driver.turn()
    assert driver.plan().preempted == ("last",)
    driver.commit()
    assert last.status is RequestStatus.STOPPED
    assert driver.scheduler.num_waiting == 0
    driver.drain()


def test_nobody_is_admitted_before_its_tokens_in_flight_are_known(drive, request_of):
    driver, first, last = fill(drive, request_of, depth=2)
    driver.plan()
    driver.cancel(first.request_id)
    assert driver.plan() is None  # pages are there, but its first token is not
    driver.commit()
    plan = driver.plan()
    assert [(row.request, row.num_tokens) for row in plan.prefill_rows] == [(last, 9)]
    driver.drain()


def test_nobody_is_admitted_into_a_plan_that_preempts(drive, request_of):
    driver, _, _ = fill(drive, request_of)
    driver.add(request_of("urgent", [3] * 4, 2, arrival_s=0.0))
    plan = driver.turn()
    assert plan.preempted == ("last",)
    assert plan.prefill_rows == ()
    driver.drain()


def test_a_row_waits_for_pages_that_are_sure_to_come_instead_of_preempting(drive, request_of):
    driver = drive(TIGHT, enable_prefix_caching=False, depth=1)
    ending = driver.add(request_of("ending", [1] * 8, 1, arrival_s=1.0))
    driver.add(request_of("going on", [2] * 8, 6, arrival_s=2.0))
    driver.turn()
    assert driver.plan() is None  # needs a page; the first request's last token is in flight
    driver.commit()
    assert ending.status is RequestStatus.LENGTH
    driver.drain()
    assert driver.scheduler.load().num_preemptions == 0


def test_a_preempted_request_comes_back_only_with_headroom(drive, request_of):
    driver = drive({"num_pages": 7, "max_num_batched_tokens": 32}, enable_prefix_caching=False)
    driver.add(request_of("a", [1] * 12, 11, arrival_s=1.0))
    driver.add(request_of("b", [2] * 12, 4, arrival_s=2.0))
    driver.turn()
    assert driver.turn().preempted == ("b",)
    # "b" would fit beside "a" (2 pages are free, and 4 of 6 after that), but not with a page more.
    while driver.scheduler.num_running:
        plan = driver.turn()
        assert plan is None or [row.request.request_id for row in plan.decode_rows] == ["a"]
        if not driver.scheduler.num_waiting:
            break
    driver.drain()
    assert driver.scheduler.load().num_preemptions == 1


def test_recomputing_reads_what_the_prefix_cache_still_holds(drive, request_of):
    driver = drive({"num_pages": 7, "max_num_batched_tokens": 32})
    driver.add(request_of("first", [1] * 8, 9, arrival_s=1.0))
    last = driver.add(request_of("last", [2] * 16, 2, arrival_s=2.0))
    driver.turn()
    assert driver.turn().preempted == ("last",)
    driver.drain()
    again = [r for p in driver.plans for r in p.prefill_rows if r.request is last and r.is_new][1]
    assert again.start > 0
    assert last.num_cached_tokens == 0  # at its first admission nothing was cached


def test_without_chunked_prefill_a_request_that_outgrew_a_step_is_split(drive, request_of):
    driver = drive(
        {"num_pages": 8, "max_num_batched_tokens": 12},
        enable_chunked_prefill=False,
        enable_prefix_caching=False,
    )
    driver.add(request_of("first", [1] * 8, 20, arrival_s=1.0))
    last = driver.add(request_of("last", [2] * 9, 12, arrival_s=2.0))
    driver.drain()
    assert last.metrics.num_preemptions == 1
    chunks = [row for p in driver.plans for row in p.prefill_rows if row.request is last]
    assert len(chunks) >= 3


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_crowd_in_a_tiny_pool_always_ends(drive, request_of, depth):
    driver = drive({"num_pages": 6, "max_num_seqs": 4}, depth=depth, num_decode_steps=4)
    for i in range(12):
        driver.add(request_of(str(i), [i % 3] * (1 + i % 7), 11 - i % 4, arrival_s=float(i)))
    driver.drain()
    assert driver.scheduler.load().num_preemptions > 0


def test_a_policy_that_names_no_victims_costs_the_row_in_need_its_own_pages(drive, request_of):
    nobody = Policy(name="nobody", choose_victims=lambda *_: [], place=by_arrival)
    driver, first, _ = fill(drive, request_of, policy=nobody)
    assert first.request_id in driver.turn().preempted
    driver.drain()


def test_a_victim_that_had_just_gained_a_page_leaves_no_trace_in_the_plan(drive, request_of):
    best_first = Policy(
        name="best first",
        choose_victims=lambda snapshot, *_: sorted(
            snapshot.running, key=lambda request: request.arrival_s
        ),
        place=by_arrival,
    )
    driver = drive({**TIGHT, "num_pages": 6}, enable_prefix_caching=False, policy=best_first)
    driver.add(request_of("first", [1] * 8, 6, arrival_s=1.0))
    last = driver.add(request_of("last", [2] * 8, 6, arrival_s=2.0))
    driver.turn()
    plan = driver.turn()
    assert plan.preempted == ("first",)
    assert [slot for slot, _, _ in plan.page_updates] == [last.slot]
    driver.drain()


def test_a_row_that_computes_known_tokens_again_may_need_the_pages_of_rows_that_decode(
    drive, request_of
):
    slo, chosen = get_policy("slo"), []

    def choose_victims(snapshot, beneficiary, num_pages):
        for request in snapshot.running:
            if request not in list(snapshot.decoding.requests):
                chosen.append(slo.choose_victims(snapshot, request, num_pages))
                assert set(chosen[-1]) <= set(snapshot.running)
        return slo.choose_victims(snapshot, beneficiary, num_pages)

    policy = dataclasses.replace(slo, choose_victims=choose_victims)
    for num_pages in range(8, 16):
        limits = {"num_pages": num_pages, "max_num_batched_tokens": 8}
        driver = drive(limits, policy=policy, num_decode_steps=4)
        for name in "abc":
            driver.add(request_of(name, [ord(name)] * 4, 16))
        driver.turn()
        driver.add(request_of("long", list(range(24)), 2))
        driver.drain()
    assert any(chosen)
