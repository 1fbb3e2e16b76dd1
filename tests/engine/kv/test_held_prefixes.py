"""Prefixes that several sequences hold at once, counted once for all of them."""

from __future__ import annotations

import random

import pytest

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.kv.sequence_pages import SequencePages
from tests.engine.made_requests import make_request

PAGE_SIZE = 2


@pytest.fixture
def kv():
    return KVManager(num_pages=64, page_size=PAGE_SIZE, enable_prefix_caching=True)


def opened(kv: KVManager, text: str) -> SequencePages:
    """An empty sequence whose pages hold a letter each, and then one token."""
    tokens = [ord(letter) for letter in text for _ in range(PAGE_SIZE)]
    return kv.open(make_request(text, [*tokens, 0]))


def admitted(kv: KVManager, text: str) -> SequencePages:
    """A sequence that was admitted with all that is cached of it, and computed."""
    pages, num_tokens = opened(kv, text), len(text) * PAGE_SIZE + 1
    kv.admit(pages, kv.lookup.match(pages), num_tokens)
    kv.register_full_pages(pages, num_tokens)
    return pages


def found(kv: KVManager, text: str) -> list[int]:
    return kv.lookup.match(opened(kv, text)).page_ids


def test_sequences_that_begin_alike_hold_one_run(kv):
    first, second, third = (admitted(kv, text) for text in ("abcd", "abcx", "abcy"))
    assert first.runs[0] is None  # it found nothing
    assert second.runs[0] is third.runs[0]
    assert second.runs[0].num_holders == 2
    # Its owner and the run.
    assert [kv.pool.num_references(page) for page in first.page_ids[:4]] == [2, 2, 2, 1]


def test_a_run_is_split_where_another_sequence_goes_on_otherwise(kv):
    owner = admitted(kv, "abcdef")
    long, short = admitted(kv, "abcdef"), admitted(kv, "abx")
    assert (len(long.runs[0]), len(short.runs[0])) == (6, 2)
    assert long.runs[0].before is short.runs[0]
    assert long.runs[0].own_page_ids == owner.page_ids[2:6]
    kv.check_integrity([owner, long, short])
    assert found(kv, "abcdefg") == owner.page_ids[:6]
    assert found(kv, "abcdx") == owner.page_ids[:4]
    assert found(kv, "abxy") == [*owner.page_ids[:2], short.page_ids[2]]


def test_two_matches_made_before_either_is_held_become_one_run(kv):
    owner = admitted(kv, "abcd")
    sequences = [opened(kv, text) for text in ("abcd", "abcd", "ab")]
    matches = [kv.lookup.match(pages) for pages in sequences]
    for pages, matched in zip(sequences, matches, strict=True):
        kv.admit(pages, matched, pages.request.num_tokens)
    assert sequences[0].runs[0] is sequences[1].runs[0]
    assert sequences[2].runs[0] is sequences[0].runs[0].before
    kv.check_integrity([owner, *sequences])


def test_a_run_is_found_as_long_as_anybody_holds_it(kv):
    owner = admitted(kv, "abcd")
    page_ids = owner.page_ids[:4]
    second, third = admitted(kv, "abcd"), admitted(kv, "abcdef")
    for pages in (owner, second):
        kv.release(pages)
    assert kv.num_pages_to_take(kv.lookup.match(opened(kv, "abcd")), 9) == 1
    assert kv.pool.num_cached == 0
    kv.release(third)
    assert kv.cache.next_to_evict(6) == [*reversed(found(kv, "abcdef"))]
    assert found(kv, "abcd") == page_ids
    assert kv.num_pages_to_take(kv.lookup.match(opened(kv, "abcd")), 9) == 5
    kv.check_integrity([])


def test_forgotten_prefixes_are_not_found_and_yet_given_back(kv):
    live = [admitted(kv, "abcd"), admitted(kv, "abcd"), admitted(kv, "abx")]
    kv.forget_prefixes()
    assert found(kv, "abcd") == []
    live += [admitted(kv, "abcd"), admitted(kv, "abcd")]
    assert found(kv, "abcd") == live[3].page_ids[:4]
    kv.check_integrity(live)
    while live:
        kv.release(live.pop(0))
        kv.check_integrity(live)
    assert kv.num_available == kv.pool.num_usable


@pytest.mark.parametrize("seed", range(20))
def test_pages_are_owned_and_given_up_as_if_each_sequence_held_each_page(kv, seed):
    rng = random.Random(seed)
    live: list[SequencePages] = []
    expected: list[int] = []  # pages that nobody holds, the first to be given up first
    for _ in range(150):
        text = "".join(rng.choices("ab", k=rng.randint(1, 7)))
        pages = opened(kv, text)
        matched = kv.lookup.match(pages)
        num_tokens = pages.request.num_tokens
        num_held = len({*matched.page_ids} & {page for p in live for page in p.page_ids})
        num_new = kv.needs.held(num_tokens) - num_held
        assert kv.num_pages_to_take(matched, num_tokens) == num_new
        if num_new <= kv.num_available and rng.random() < 0.6:
            num_evicted = max(0, num_new - len(matched) + num_held - kv.pool.num_free)
            kv.admit(pages, matched, num_tokens)
            expected = [page for page in expected if page not in matched.page_ids][num_evicted:]
            if rng.random() < 0.9:
                kv.register_full_pages(pages, num_tokens)
                expected = kv.cache.next_to_evict(64)  # what was computed twice goes last
            live.append(pages)
        elif live:
            ended = live.pop(rng.randrange(len(live)))
            held = {page for p in live for page in p.page_ids}
            expected += [
                page for page in reversed(ended.page_ids) if page in kv.cache and page not in held
            ]
            kv.release(ended)
        assert kv.cache.next_to_evict(64) == expected
        kv.check_integrity(live)
