"""Preempted sequences on the host: out, back, lost on the way, and never a wrong token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.engine.request import RequestStatus
from octavo.engine.scheduler.policies import get_policy

TIGHT = {"num_pages": 5, "max_num_batched_tokens": 32, "num_host_pages": 8}
"""Four pages of four tokens on the device: two requests of eight fill them. Eight on the host."""


def always(swaps, policy="fcfs"):
    return replace(get_policy(policy), swap_or_recompute=lambda *_: swaps)


def fill(drive, request_of, *, swaps=True, limits=None, **driver_args):
    """Two running requests that need a third page each in the next plan, and none is left."""
    driver = drive(
        {**TIGHT, **(limits or {})},
        policy=always(swaps),
        enable_prefix_caching=False,
        **driver_args,
    )
    first = driver.add(request_of("first", [1] * 8, 6, arrival_s=1.0))
    last = driver.add(request_of("last", [2] * 8, 6, arrival_s=2.0))
    driver.turn()
    return driver, first, last


def chunks_of(driver, request):
    return [row for plan in driver.plans for row in plan.prefill_rows if row.request is request]


def test_a_swapped_request_goes_on_where_it_was(drive, request_of):
    driver, first, last = fill(drive, request_of)
    plan = driver.turn()
    assert plan.preempted == ("last",)
    (copy,) = plan.copy_outs
    assert (copy.request_id, len(copy.device_pages)) == ("last", 2)
    load = driver.scheduler.load()
    assert (load.num_swapped_tokens, load.num_recomputed_tokens) == (8, 0)
    copy_s = driver.scheduler.forecast.page_copy_s
    assert (load.swap_cost_s, load.recompute_cost_s) == (2 * 2 * copy_s, 0)
    assert driver.scheduler.load().num_host_owned_pages == 2
    driver.end_transfer(copy.transfer_id)
    while not first.status.is_finished:
        driver.turn()
    plan = driver.turn()
    assert [back.request_id for back in plan.copy_ins] == ["last"]
    assert plan.num_rows == 0
    assert driver.plan() is None  # its pages are on their way
    driver.end_transfer(plan.copy_ins[0].transfer_id)
    driver.drain()
    # All 8 tokens of the prompt once, then nothing but the one token that was never an input.
    assert [(row.start, row.num_tokens) for row in chunks_of(driver, last)] == [(0, 8), (8, 1)]
    assert driver.scheduler.load().num_swaps == 1


def test_recompute_is_still_there_to_be_chosen(drive, request_of):
    driver, _, last = fill(drive, request_of, swaps=False)
    assert driver.turn().copy_outs == ()
    load = driver.scheduler.load()
    assert (load.num_swapped_tokens, load.num_recomputed_tokens) == (0, 8)
    assert (load.swap_cost_s > 0, load.recompute_cost_s > 0) == (False, True)
    driver.drain()
    assert [row.start for row in chunks_of(driver, last)] == [0, 0]


def test_without_room_on_the_host_it_is_computed_again(drive, request_of):
    driver, _, last = fill(drive, request_of, limits={"num_host_pages": 1})
    assert driver.turn().copy_outs == ()
    driver.drain()
    assert last.status is RequestStatus.LENGTH


@pytest.mark.parametrize("lost", ["out", "in"])
def test_a_failed_copy_loses_no_request(drive, request_of, lost):
    driver, first, last = fill(drive, request_of)
    (copy,) = driver.turn().copy_outs
    driver.end_transfer(copy.transfer_id, ok=lost != "out")
    while not first.status.is_finished:
        driver.turn()
    plan = driver.turn()
    if lost == "in":
        driver.end_transfer(plan.copy_ins[0].transfer_id, ok=False)
    driver.drain()
    assert last.status is RequestStatus.LENGTH
    assert [row.start for row in chunks_of(driver, last)] == [0, 0]
    assert driver.scheduler.load().num_host_owned_pages == 0


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_request_cancelled_while_it_is_copied_gives_everything_back(drive, request_of, way):
    driver, first, _ = fill(drive, request_of)
    (copy,) = driver.turn().copy_outs
    if way == "in":
        driver.end_transfer(copy.transfer_id)
        while not first.status.is_finished:
            driver.turn()
        (copy,) = driver.turn().copy_ins
    driver.cancel("last")
    driver.scheduler.check_integrity()
    load = driver.scheduler.load()
    assert load.num_host_owned_pages == 2
    assert load.num_transfer_pages == (2 if way == "in" else 0)
    driver.end_transfer(copy.transfer_id)
    load = driver.scheduler.load()
    assert load.num_host_owned_pages == load.num_transfer_pages == 0
    driver.drain()


def test_swap_is_chosen_when_copying_is_cheaper_than_computing(drive, request_of):
    for page_copy_s, num_swaps in ((1e-6, 1), (10.0, 0)):
        driver = drive(TIGHT, enable_prefix_caching=False, page_copy_s=page_copy_s)
        driver.add(request_of("first", [1] * 8, 6, arrival_s=1.0))
        driver.add(request_of("last", [2] * 8, 6, arrival_s=2.0))
        driver.drain()
        assert driver.scheduler.load().num_preemptions == 1
        assert driver.scheduler.load().num_swaps == num_swaps


def test_the_speed_of_copies_is_measured(drive, request_of):
    driver, _, _ = fill(drive, request_of)
    (copy,) = driver.turn().copy_outs
    before = driver.scheduler.forecast.page_copy_s
    driver.now_s += 4.0
    driver.end_transfer(copy.transfer_id)
    slower = driver.scheduler.forecast.page_copy_s
    assert slower == pytest.approx(before + 0.02 * (2.0 - before))
    driver.scheduler.forecast.observe_copy(4, 4 * before)
    assert driver.scheduler.forecast.page_copy_s == pytest.approx(slower - 0.3 * (slower - before))
    driver.drain()


def test_a_copy_that_was_timed_itself_is_not_taken_for_as_long_as_the_step_it_ended_in(
    drive, request_of
):
    driver, _, _ = fill(drive, request_of)
    (copy,) = driver.turn().copy_outs
    before = driver.scheduler.forecast.page_copy_s
    driver.now_s += 4.0
    driver.device.end_transfer(copy.transfer_id, True)
    driver.scheduler.complete_transfer(copy.transfer_id, True, driver.now_s, 2 * before / 3)
    learned = driver.scheduler.forecast.page_copy_s
    assert before / 3 < learned < before
    driver.drain()


def test_evicted_prefixes_come_back_from_the_host(drive, request_of):
    driver = drive(
        {"num_pages": 7, "num_host_pages": 16, "max_num_batched_tokens": 64},
        page_copy_s=1e-9,
    )
    shared = list(range(16))
    driver.add(request_of("first", [*shared, 1], 2))
    driver.drain()
    driver.add(request_of("other", [9] * 22, 2))  # takes every page: the prefix is evicted
    driver.drain()
    assert driver.scheduler.load().num_host_cached_pages >= 4
    again = driver.add(request_of("again", [*shared, 2], 2))
    driver.drain()
    assert sum(len(copy.host_pages) for plan in driver.plans for copy in plan.copy_ins) == 4
    assert [row.start for row in chunks_of(driver, again)] == [16]


def test_losing_the_device_while_pages_are_copied_loses_no_request(drive, request_of):
    driver, first, last = fill(drive, request_of)
    driver.turn()
    driver.in_flight.clear()
    driver.scheduler.recover(driver.now_s)
    driver.device.lose_everything()
    driver.drain()
    assert first.status is last.status is RequestStatus.LENGTH


def test_pages_of_another_engine_are_found_and_not_computed(fakes):
    limits = fakes.limits(page_size=4, num_pages=40, num_host_pages=20)
    one, other = (fakes.Driver(limits, page_copy_s=0.0) for _ in range(2))
    prompt = list(range(1, 31))
    request = one.add(fakes.request("a", prompt, 8))
    one.turn()
    one.turn()
    assert one.give_pages(request) == 0, "they are on their way"
    one.turn()
    for transfer_id in list(one.device.transfers):
        one.end_transfer(transfer_id, True)
    assert one.give_pages(request) == len(prompt) // 4

    moved = other.add(fakes.request("a", prompt, 8))
    assert other.take_pages(moved, 0) == len(prompt) // 4
    assert other.take_pages(moved, 0) == 0, "it has them"
    other.drain()
    computed = sum(row.num_tokens for plan in other.plans for row in plan.prefill_rows)
    assert computed == len(prompt) % 4
