"""What a waiting request still has to compute, as pages come and go."""

from __future__ import annotations

import pytest

from octavo.engine.errors import UnattainableTargetError
from octavo.engine.request import Priority
from octavo.engine.scheduler.step_time_model import StepTimeModel

PROMPT = [n % 7 + 1 for n in range(32)]
FEW_ROWS = {"max_num_seqs": 1, "max_prefill_rows": 1, "num_pages": 30}


def serve(driver, request):
    driver.add(request)
    driver.drain()


@pytest.fixture
def sound_model():
    """A step takes a millisecond a prompt token."""
    return StepTimeModel((16,), fixed_s=0.0, decode_row_s=0.0, prefill_token_s=1e-3)


def apply_all(driver):
    """As many applies as bring every estimate up to date."""
    work = driver.scheduler._table.work
    for _ in range(100):
        work.measure_changed()
    assert not work.num_stale


def rows_of(driver, request):
    return [row for plan in driver.plans for row in plan.prefill_rows if row.request is request]


def test_a_new_request_need_not_compute_what_is_cached(drive, request_of):
    driver = drive()
    serve(driver, request_of("a", PROMPT))
    later = driver.add(request_of("b", [*PROMPT, 1, 2]))
    assert (later.num_reusable_tokens, later.num_missing_tokens) == (32, 2)
    driver.turn()
    assert later.num_reusable_tokens == 0  # it runs: it is known now
    driver.drain()


def test_the_last_token_is_always_missing(drive, request_of):
    driver = drive()
    serve(driver, request_of("a", PROMPT))
    later = driver.add(request_of("b", PROMPT))
    assert later.num_missing_tokens == 4
    driver.drain()


def test_prompt_logprobs_need_every_token(drive, request_of):
    driver = drive()
    serve(driver, request_of("a", PROMPT))
    later = driver.add(request_of("b", [*PROMPT, 1], params={"prompt_logprobs": 0}))
    assert later.num_missing_tokens == 33
    driver.drain()


def test_pages_that_appear_are_counted(drive, request_of):
    driver = drive(FEW_ROWS)
    serve(driver, request_of("seed", [50, 51, 52, 53, 1], 1))
    other = driver.add(request_of("first", [9, 9, 9, 9, 9], 20))
    driver.turn()
    waiting = driver.add(request_of("a", [9, 9, 9, 9, *PROMPT], 2))
    assert waiting.num_missing_tokens == 32  # the page of the one that runs is there
    assert other.slot is not None
    driver.turn()
    driver.drain()
    # Its whole beginning, and the output of another, which becomes findable as that one ends.
    output = other.output_token_ids
    again = request_of("b", [9, 9, 9, 9, 9, *output[:18], 1], 2)
    late = driver.add(again)
    assert late.num_missing_tokens == again.num_tokens - 20
    driver.drain()


def test_pages_of_an_output_are_counted_when_its_request_ends(drive, fakes, request_of):
    driver = drive(FEW_ROWS)
    first = driver.add(request_of("first", [9] * 5, 12))
    driver.turn()
    said = fakes.oracle(first)
    waiting = driver.add(request_of("next turn", [*[9] * 5, *said, 1, 2], 2))
    assert waiting.num_missing_tokens == waiting.num_tokens - 4
    while not first.status.is_finished:
        driver.turn()
    driver.plan()
    assert rows_of(driver, waiting)[0].start == 16
    driver.drain()


def test_pages_that_are_evicted_are_counted_no_longer(drive, request_of):
    driver = drive(FEW_ROWS)
    serve(driver, request_of("a", PROMPT, 1))
    big = driver.add(request_of("big", [60 + n for n in range(70)], 40))
    driver.turn()
    waiting = driver.add(request_of("b", [*PROMPT, 1], 2))
    assert waiting.num_missing_tokens == 1
    missing = set()
    while not big.status.is_finished:
        driver.turn()
        apply_all(driver)
        driver.scheduler.check_integrity()
        if waiting.slot is None:
            missing.add(waiting.num_missing_tokens)
    assert max(missing) > 1  # pages were given up, the end of the prompt's first
    assert sorted(missing) == list(range(1, max(missing) + 1, 4))
    driver.drain()


def test_flushing_the_cache_makes_everything_missing(drive, request_of):
    driver = drive(FEW_ROWS)
    serve(driver, request_of("a", PROMPT, 1))
    driver.add(request_of("runs", [60] * 6, 20))
    driver.turn()
    waiting = driver.add(request_of("b", [*PROMPT, 1], 2))
    driver.scheduler.flush_prefixes()
    apply_all(driver)
    assert waiting.num_missing_tokens == 33
    driver.drain()


def test_of_several_that_wait_one_computes_for_all(drive, request_of):
    driver = drive(FEW_ROWS)
    driver.add(request_of("runs", [60] * 6, 20))
    driver.turn()
    waiting = [driver.add(request_of(name, [*PROMPT, n], 2)) for n, name in enumerate("abc")]
    assert [request.num_missing_tokens for request in waiting] == [33, 1, 1]
    driver.cancel("a")
    apply_all(driver)
    assert [request.num_missing_tokens for request in waiting[1:]] == [33, 1]
    load = driver.scheduler.load(0.0)
    assert load.queues[Priority.NORMAL].num_prompt_tokens == 34
    driver.drain()


def test_a_demoted_request_computes_for_nobody_in_advance(drive, request_of):
    driver = drive(FEW_ROWS)
    driver.add(request_of("runs", [60] * 6, 20))
    driver.turn()
    waiting = [driver.add(request_of(name, [*PROMPT, n], 2)) for n, name in enumerate("ab")]
    table = driver.scheduler._table
    table.demote(table.live.entry(waiting[0]))
    apply_all(driver)
    driver.scheduler.check_integrity()
    assert [request.num_missing_tokens for request in waiting] == [1, 33]
    driver.drain()


def test_a_preempted_request_keeps_what_its_pages_hold_until_they_are_given_up(drive, request_of):
    driver = drive({"num_pages": 40})
    victim = driver.add(request_of("victim", PROMPT, 8))
    driver.turn()
    driver.turn()
    driver.turn()
    table = driver.scheduler._table
    driver.scheduler.apply_plan()
    driver.scheduler._planner.preemption.preempt(table.live.entry(victim), driver.now_s)
    assert victim.num_missing_tokens == victim.num_tokens - 32
    driver.drain()


def test_a_swapped_request_is_priced_by_its_copies(drive, request_of):
    driver = drive({"num_host_pages": 40}, page_copy_s=1e-9)
    victim = driver.add(request_of("victim", PROMPT, 8))
    for _ in range(3):
        driver.turn()
    scheduler = driver.scheduler
    scheduler.apply_plan()
    table = scheduler._table
    snapshot = table.snapshot(driver.now_s)
    computed = victim.num_computed_tokens
    scheduler._planner.preemption.preempt(table.live.entry(victim), driver.now_s, snapshot)
    assert scheduler._builder.counts.swaps.num_requests == 1
    # Pages of the prompt are on the device still; the copies of the others cost next to nothing.
    assert victim.num_missing_tokens == victim.num_tokens - computed + 1
    driver.drain()


@pytest.mark.parametrize("caches", [True, False])
def test_a_swapped_request_whose_copy_fails_has_everything_to_compute(drive, request_of, caches):
    driver = drive({"num_host_pages": 40}, page_copy_s=1e-9, enable_prefix_caching=caches)
    victim = driver.add(request_of("victim", PROMPT, 8))
    for _ in range(3):
        driver.turn()
    scheduler = driver.scheduler
    scheduler.apply_plan()
    table = scheduler._table
    snapshot = table.snapshot(driver.now_s)
    scheduler._planner.preemption.preempt(table.live.entry(victim), driver.now_s, snapshot)
    assert victim.num_missing_tokens <= 3
    driver.plan()
    (transfer_id,) = driver.device.transfers
    driver.end_transfer(transfer_id, ok=False)
    apply_all(driver)
    assert victim.num_missing_tokens == victim.num_tokens - 32 * caches
    driver.drain()


@pytest.mark.parametrize(("page_copy_s", "num_missing"), [(1e-9, 2), (1e3, 29)])
def test_pages_on_the_host_count_for_what_their_copies_cost(
    drive, request_of, page_copy_s, num_missing
):
    driver = drive({**FEW_ROWS, "num_pages": 16, "num_host_pages": 64}, page_copy_s=page_copy_s)
    serve(driver, request_of("a", PROMPT, 1))
    serve(driver, request_of("big", [60 + n for n in range(55)], 1))
    for transfer_id in list(driver.device.transfers):
        driver.end_transfer(transfer_id)
    scheduler = driver.scheduler
    scheduler.forecast.page_copy_s = page_copy_s
    assert scheduler._kv.host.num_cached == 7  # one page is on the device still
    waiting = driver.add(request_of("b", [*PROMPT, 1], 2))
    assert waiting.num_missing_tokens == num_missing
    driver.drain()


def test_at_the_door_cached_pages_count(drive, request_of, sound_model):
    driver = drive(policy="slo", step_time=sound_model)
    cold = request_of("cold", PROMPT, 1, ttft_target_s=0.02)
    with pytest.raises(UnattainableTargetError):  # an idle machine would take 32 ms for it
        driver.scheduler.add(cold, 0.0)
    assert cold.num_reusable_tokens == 0
    assert not driver.scheduler.has_unfinished
    driver.scheduler.check_integrity()  # it left nothing behind
    serve(driver, request_of("seed", PROMPT, 1))
    warm = request_of("warm", PROMPT, 1, ttft_target_s=0.02)
    serve(driver, warm)
    assert warm.num_cached_tokens == 28


def test_the_time_to_the_first_token_counts_what_is_cached(drive, request_of, sound_model):
    driver = drive(FEW_ROWS, step_time=sound_model)
    serve(driver, request_of("a", PROMPT, 1))
    driver.add(request_of("runs", [60] * 6, 20))
    driver.turn()
    scheduler = driver.scheduler
    before = scheduler.predict_ttft_s(8, driver.now_s)
    waiting = driver.add(request_of("b", [*PROMPT, 1], 2))
    added = scheduler.predict_ttft_s(8, driver.now_s) - before
    assert waiting.num_missing_tokens == 1
    # A token that is missing takes a millisecond, all 33 of the prompt would take 33.
    assert 0 < added < 3e-3 < scheduler.forecast.prefill_s(33)
    known = scheduler.num_cached_tokens([*PROMPT, 5])
    assert known == 32
    full = scheduler.predict_ttft_s(33, driver.now_s)
    spared = full - scheduler.predict_ttft_s(33, driver.now_s, num_cached_tokens=known)
    # A millisecond for each cached token, and what rows beside them add to the steps.
    assert scheduler.forecast.prefill_s(32) <= spared <= 1.1 * scheduler.forecast.prefill_s(32)
    assert scheduler.num_cached_tokens([*PROMPT, 5], tenant="other") == 0
    driver.drain()
