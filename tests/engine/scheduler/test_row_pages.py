"""Pages of the rows: what they have room for, and how they grow."""

from __future__ import annotations

import numpy as np

from octavo.engine.scheduler.rows import RowPages

PAGE_SIZE = 4


def pages_of(page_ids: dict[int, list[int]]) -> RowPages:
    pages = RowPages(4, PAGE_SIZE)
    for slot, ids in page_ids.items():
        pages.enter(slot, ids)
    return pages


def test_rows_that_grow_find_their_pages_once_they_are_handed_out():
    page_ids = {3: [5], 1: [6, 7]}
    pages = pages_of(page_ids)
    assert pages.last_pages([3, 1]) == [5, 7]
    assert list(pages.grow([3, 1], [1, 2], [8, 9])) == [(3, 1, 8), (1, 2, 9)]
    assert page_ids == {3: [5], 1: [6, 7]}
    for _ in range(2):
        pages.hand_out()
        assert pages.capacity[[3, 1]].tolist() == [8, 12]
        assert page_ids == {3: [5, 8], 1: [6, 7, 9]}


def test_rows_are_full_once_the_place_of_their_input_is_in_no_page():
    pages = pages_of({3: [5], 1: [6, 7], 2: [8]})
    full = pages.full(np.array([1, 2, 3]), np.array([7, 4, 3], np.int32))
    assert (full.indices, full.slots, full.num_pages) == ([1], [2], [1])


def test_pages_that_rows_have_just_got_are_not_missing():
    pages = pages_of({3: [5], 1: [6, 7]})
    slots, ends = np.array([3, 1]), np.array([9, 8], np.int32)
    assert pages.num_missing(slots, ends).tolist() == [2, 0]
    pages.grow([3], [1], [8])
    assert pages.num_missing(slots, ends).tolist() == [1, 0]
    pages.has_grown(1, 2)
    assert pages.num_pages(slots) == [2, 4]
    pages.hand_out()
    assert pages.num_pages(slots) == [2, 4]
