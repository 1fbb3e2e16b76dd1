"""Growing many sequences at once gives each the page that growing them in turn would."""

from __future__ import annotations

import pytest

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.request import Request
from tests.engine.made_requests import make_request


def request_of(name: str, num_prompt: int) -> Request:
    return make_request(name, [hash(name) % 1000 + index for index in range(num_prompt)])


def full_pool(num_host_pages: int, run_pages: int = 1):
    """Three running sequences, a free page, and three that only the prefix cache holds."""
    kv = KVManager(
        num_pages=11,
        page_size=2,
        enable_prefix_caching=True,
        num_host_pages=num_host_pages,
        run_pages=run_pages,
    )
    ended = kv.open(request_of("ended", 6))
    kv.admit(ended, kv.lookup.match(ended), 6)
    kv.register_full_pages(ended, 6)
    running = [kv.open(request_of(name, 4)) for name in "abc"]
    for pages in running:
        kv.admit(pages, kv.lookup.match(pages), 4)
    kv.release(ended)
    return kv, [ended, *running], running


@pytest.mark.parametrize("num_host_pages", [0, 4])
def test_pages_and_evictions_are_those_of_growing_one_after_the_other(num_host_pages: int) -> None:
    kv, _, running = full_pool(num_host_pages)
    assert (kv.pool.num_free, kv.num_available) == (1, 4)
    expected = [kv.grow(pages, 5)[0] for pages in running]
    evicted = kv.allocator.take_evicted()
    assert len(evicted) == (2 if num_host_pages else 0)

    kv, live, running = full_pool(num_host_pages)
    new = kv.allocator.take(3)
    for pages, page in zip(running, new, strict=True):
        pages.page_ids.append(page)
    assert new == expected
    assert kv.allocator.take_evicted() == evicted
    assert [len(pages.page_ids) for pages in running] == [3, 3, 3]
    kv.check_integrity(live)


def test_pages_that_a_sequence_grows_by_follow_each_other_until_it_ends() -> None:
    kv = KVManager(num_pages=33, page_size=2, enable_prefix_caching=False, run_pages=4)
    running = [kv.open(request_of(name, 4)) for name in "abc"]
    for pages in running:
        kv.admit(pages, kv.lookup.match(pages), 4)
    for num_tokens in range(5, 13):
        for pages in running:
            kv.grow(pages, num_tokens)
    for pages in running:
        first = pages.page_ids[2]
        assert pages.page_ids[2:] == list(range(first, first + 4))
    kv.check_integrity(running)
    assert kv.num_available == 32 - 3 * 6
    # What was kept for a sequence is not when it has ended.
    kv.grow(running[0], 13)
    assert kv.pool.num_not_kept == kv.num_available - 3
    kv.release(running.pop(0))
    assert kv.pool.num_not_kept == kv.num_available == 32 - 2 * 6
    kv.check_integrity(running)


def test_a_sequence_that_grows_by_several_pages_goes_on_where_some_were_kept() -> None:
    kv = KVManager(num_pages=17, page_size=2, enable_prefix_caching=False, run_pages=4)
    one, other = (kv.open(request_of(name, 4)) for name in "ab")
    for pages in (one, other):
        kv.admit(pages, kv.lookup.match(pages), 4)
        kv.grow(pages, 5)
    assert kv.grow(one, 11) == [4, 5, 6]
    kv.check_integrity([one, other])


def test_the_prefix_cache_gives_up_a_stretch_for_a_sequence_and_no_more() -> None:
    kv, live, (one, other, _) = full_pool(0, run_pages=3)
    assert (kv.pool.num_free, kv.pool.num_cached) == (1, 3)
    # The free page 10 and, of the cached ones, those of the end of the prefix: 3 and 2.
    kv.grow(one, 5)
    assert one.page_ids[2:] == [2]
    assert (kv.pool.num_not_kept, kv.pool.num_cached) == (1, 1)
    # The next page is there; nothing is evicted for it.
    kv.grow(one, 7)
    assert one.page_ids[2:] == [2, 3]
    assert (kv.pool.num_not_kept, kv.pool.num_cached) == (1, 1)
    # What is left is not enough for another stretch, and all of it goes.
    kv.grow(other, 5)
    assert (kv.num_available, kv.pool.num_cached) == (1, 0)
    kv.check_integrity(live)
