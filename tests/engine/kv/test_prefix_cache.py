"""The index of full pages."""

from __future__ import annotations

import pytest

from octavo.engine.kv.prefix_cache import PrefixCache

A, B, C, D = (bytes([i]) * 16 for i in range(4))


@pytest.fixture
def cache():
    """Pages 1, 2, 3 hold A, B, C; nobody holds 2 and then 1."""
    cache = PrefixCache(9)
    for page_hash, page in ((A, 1), (B, 2), (C, 3)):
        assert cache.register(page_hash, page)
    cache.mark_unreferenced([2, 1])
    return cache


def test_a_match_ends_at_the_first_unknown_page(cache):
    assert cache.longest_match([A, B, C]) == [1, 2, 3]
    assert cache.longest_match([A, D, C]) == [1]
    assert cache.longest_match([D, A]) == []


def test_the_first_page_with_a_content_stays_its_page(cache):
    assert not cache.register(A, 4)
    assert cache.longest_match([A]) == [1]
    assert 4 not in cache


def test_pages_unreferenced_for_longest_go_first(cache):
    cache.mark_unreferenced([3])
    assert cache.evict(2) == [2, 1]
    assert cache.longest_match([A, B]) == []
    assert cache.longest_match([C]) == [3]
    assert len(cache) == 1


def test_what_a_page_held_is_not_found_once_it_was_given_up_whatever_is_asked_first(cache):
    for ask in (
        lambda: 2 in cache,
        lambda: cache.contents[2] is not None,
        lambda: cache.longest_match([B]),
        lambda: not cache.register(B, 2),
    ):
        assert cache.evict(1) == [2]
        assert len(cache) == 2
        assert cache.longest_match([A, B, C]) == [1]
        assert not ask()
        cache.register(B, 2)
        cache.mark_referenced([1])
        cache.mark_unreferenced([2, 1])
        cache.check_integrity([1, 2])
    cache.evict(2)
    cache.flush()
    cache.register_all([A, B], [1, 2])
    assert cache.longest_match([A, B, C]) == [1, 2, 3]
    cache.check_integrity([])


def test_a_page_in_use_is_not_evicted_and_comes_back_last(cache):
    cache.mark_referenced([2])
    cache.check_integrity([1])
    cache.mark_unreferenced([2])
    assert cache.evict(1) == [1]


def test_forgetting_returns_what_nobody_holds(cache):
    assert cache.forget_all() == [2, 1]
    assert cache.longest_match([A]) == []
    assert len(cache) == 0
    cache.check_integrity([])


def test_pages_registered_together_are_those_registered_one_by_one():
    together, one_by_one = PrefixCache(9), PrefixCache(9)
    first = [A, B, C]
    for hashes, pages in ((first, [1, 2, 3]), ([A, D, C], [4, 5, 6])):
        together.register_all(hashes, pages)
        for page_hash, page in zip(hashes, pages, strict=True):
            one_by_one.register(page_hash, page)
    assert together.longest_match(first) == one_by_one.longest_match(first) == [1, 2, 3]
    assert [page in together for page in range(8)] == [page in one_by_one for page in range(8)]
    assert 5 in together
    assert 4 not in together
