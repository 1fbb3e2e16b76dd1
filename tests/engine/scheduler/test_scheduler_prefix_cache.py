"""Prompts that begin alike."""

from __future__ import annotations

import pytest

PREFIX = [7, 8, 9, 7, 8, 9, 7, 8]


def first_chunk(driver, request):
    return next(r for p in driver.plans for r in p.prefill_rows if r.request is request)


def serve(driver, request):
    driver.add(request)
    driver.drain()
    return first_chunk(driver, request)


def test_a_later_prompt_starts_behind_the_shared_pages(drive, request_of):
    driver = drive()
    serve(driver, request_of("a", [*PREFIX, 1, 2]))
    second = request_of("b", [*PREFIX, 3, 4])
    assert serve(driver, second).start == 8
    assert second.num_cached_tokens == 8
    load = driver.scheduler.load()
    assert (load.prefix_queried_tokens, load.prefix_hit_tokens) == (20, 8)


def test_the_last_prompt_token_is_always_computed(drive, request_of):
    driver = drive()
    serve(driver, request_of("a", PREFIX))
    chunk = serve(driver, request_of("b", PREFIX))
    assert (chunk.start, chunk.num_tokens, chunk.samples) == (4, 4, True)


def test_the_output_of_one_turn_is_found_by_the_next(drive, request_of):
    driver = drive()
    first = request_of("a", PREFIX, 9)
    serve(driver, first)
    chunk = serve(driver, request_of("b", [*first.all_token_ids, 1, 2, 3, 4]))
    assert chunk.start == 16  # 8 of the prompt, 8 of the output; the 9th was never an input


@pytest.mark.parametrize("difference", [{"cache_salt": "s"}, {"tenant": "t"}])
def test_salts_and_tenants_share_nothing(drive, request_of, difference):
    driver = drive()
    serve(driver, request_of("a", PREFIX))
    assert serve(driver, request_of("b", PREFIX, **difference)).start == 0
    assert serve(driver, request_of("c", PREFIX, **difference)).start == 4


def test_a_running_request_shares_its_pages(drive, request_of):
    driver = drive()
    driver.add(request_of("a", [*PREFIX, 1], 30))
    driver.turn()
    second = driver.add(request_of("b", [*PREFIX, 2], 2))
    driver.turn()
    first_pages = driver.plans[0].prefill_rows[0].page_ids
    assert first_chunk(driver, second).page_ids[:2] == first_pages[:2]
    driver.cancel("a")
    driver.drain()


def test_pages_are_found_only_once_their_step_was_committed(drive, request_of):
    driver = drive(depth=1)
    driver.add(request_of("a", [*PREFIX, 1], 30))
    driver.plan()
    second = driver.add(request_of("b", [*PREFIX, 2], 2))
    other = driver.add(request_of("c", [*PREFIX, 3], 2, params={"prompt_logprobs": 0}))
    driver.plan()
    assert first_chunk(driver, other).start == 0
    assert second.slot is None  # it waits for them
    driver.commit()
    driver.plan()
    assert first_chunk(driver, second).start == 8
    driver.drain()


def test_prompt_logprobs_compute_every_token_but_leave_pages_for_others(drive, request_of):
    driver = drive()
    params = {"prompt_logprobs": 0}
    serve(driver, request_of("a", PREFIX, params=params))
    assert serve(driver, request_of("b", PREFIX, params=params)).start == 0
    assert driver.scheduler.load().prefix_queried_tokens == 0
    assert serve(driver, request_of("c", PREFIX)).start == 4


def test_switched_off_it_keeps_nothing(drive, request_of):
    driver = drive(enable_prefix_caching=False)
    serve(driver, request_of("a", PREFIX))
    assert driver.scheduler.load().num_cached_pages == 0
    assert serve(driver, request_of("b", PREFIX)).start == 0


def test_cached_pages_make_way_for_new_ones(drive, request_of):
    driver = drive({"num_pages": 5})
    serve(driver, request_of("a", PREFIX))
    serve(driver, request_of("b", [1] * 15, 2))  # all four pages
    assert serve(driver, request_of("c", PREFIX)).start == 0


def test_hits_count_once_though_a_request_is_admitted_twice(drive, request_of):
    driver = drive({"num_pages": 7, "max_num_batched_tokens": 32})
    driver.add(request_of("first", [1] * 8, 9, arrival_s=1.0))
    driver.add(request_of("last", [2] * 16, 2, arrival_s=2.0))
    driver.drain()
    load = driver.scheduler.load()
    assert load.num_preemptions == 1
    assert (load.prefix_queried_tokens, load.prefix_hit_tokens) == (24, 0)
