"""Sharing and giving up pages."""

from __future__ import annotations

import pytest

from octavo.engine.kv.kv_manager import KVManager
from tests.engine.made_requests import make_request


@pytest.fixture
def kv():
    return KVManager(num_pages=9, page_size=4, enable_prefix_caching=True)


def request(prompt):
    return make_request(prompt=prompt)


def admitted(kv, prompt):
    """Pages of a sequence with this prompt, computed and committed."""
    pages = kv.open(request(prompt))
    kv.admit(pages, kv.lookup.match(pages), len(prompt))
    kv.register_full_pages(pages, len(prompt))
    return pages


def test_the_end_of_a_prefix_is_given_up_before_its_beginning(kv):
    prompt = [1] * 13
    first = admitted(kv, prompt)
    page_ids = list(first.page_ids)
    kv.release(first)
    other = kv.open(request([2] * 24))
    kv.admit(other, kv.lookup.match(other), 24)  # 6 of 8 pages: 5 are free, one is cached
    kv.register_full_pages(other, 24)
    again = kv.open(request(prompt))
    assert kv.lookup.match(again).page_ids == page_ids[:2]
    kv.check_integrity([other])


def test_least_recently_released_prefixes_go_first(kv):
    for prompt in ([1] * 8, [2] * 8, [1] * 8):
        kv.release(admitted(kv, prompt))
    hungry = kv.open(request([3] * 20))
    kv.admit(hungry, kv.lookup.match(hungry), 20)
    assert len(kv.lookup.match(kv.open(request([1] * 9)))) == 2
    assert len(kv.lookup.match(kv.open(request([2] * 9)))) == 1
    kv.check_integrity([hungry])


def test_two_that_computed_the_same_share_from_then_on_through_the_first(kv):
    first = kv.open(request([1] * 8))
    second = kv.open(request([1] * 8))
    for pages in (first, second):
        kv.admit(pages, kv.lookup.match(pages), 8)
    for pages in (first, second):
        kv.register_full_pages(pages, 8)
    assert kv.lookup.match(kv.open(request([1] * 9))).page_ids == first.page_ids
    kv.release(second)
    assert kv.pool.num_cached == 0
    kv.release(first)
    assert kv.pool.num_cached == 2
    kv.check_integrity([])


def test_matched_pages_that_somebody_holds_cost_nothing(kv):
    held = admitted(kv, [1] * 8)
    pages = kv.open(request([1] * 12))
    matched = kv.lookup.match(pages)
    assert kv.num_pages_to_take(matched, 12) == 1
    kv.release(held)
    assert kv.num_pages_to_take(matched, 12) == 3


def test_pages_are_found_through_output_tokens_too(kv):
    pages = admitted(kv, [1] * 6)
    pages.request.output_token_ids.extend([2] * 5)
    kv.grow(pages, 11)
    kv.register_full_pages(pages, 11)
    assert kv.lookup.match(kv.open(request([*[1] * 6, *[2] * 7]))).page_ids == pages.page_ids[:2]
    kv.check_integrity([pages])


def test_the_pool_owns_what_live_sequences_hold(kv):
    pages = admitted(kv, [1] * 8)
    assert kv.pool.num_owned == 2
    kv.release(pages)
    assert kv.pool.num_owned == 0
    assert kv.num_available == 8


def test_a_sequence_that_begins_anew_follows_no_snapshot_of_its_earlier_run():
    kv = KVManager(
        num_pages=20, page_size=4, enable_prefix_caching=True, num_snapshots=4, snapshot_tokens=4
    )
    pages = kv.open(request([1] * 12))
    kv.admit(pages, kv.lookup.match(pages), 12)
    assert kv.snapshots.saved(pages, 0, 12, 12)
    kv.register_full_pages(pages, 12)
    assert pages.follows
    kv.release(pages)
    kv.forget_prefixes()
    kv.admit(pages, kv.lookup.match(pages), 12)
    assert not pages.follows
    assert pages.diverges_at == 0
    kv.check_integrity([pages])
