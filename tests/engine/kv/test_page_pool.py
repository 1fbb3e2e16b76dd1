"""Every page is in one place."""

from __future__ import annotations

import pytest

from octavo.engine.kv.page_pool import TRASH_PAGE, PagePool


@pytest.fixture
def pool():
    pool = PagePool(num_pages=9, page_size=4)
    yield pool
    pool.check_integrity()


def kept(*pages):
    """Contents by which these pages are kept, and no others."""
    return [page if page in pages else None for page in range(9)]


def counts(pool):
    return (pool.num_free, pool.num_owned, pool.num_cached, pool.num_in_transfer)


def test_the_trash_page_is_never_handed_out(pool):
    pages = pool.allocate(8)
    assert sorted(pages) == list(range(1, 9))
    assert TRASH_PAGE not in pages
    assert counts(pool) == (0, 8, 0, 0)


def test_more_than_is_free_is_not_handed_out(pool):
    pool.allocate(7)
    with pytest.raises(AssertionError):
        pool.allocate(2)
    assert counts(pool) == (1, 7, 0, 0)


def test_a_shared_page_is_free_after_its_last_reference(pool):
    pages = pool.allocate(2)
    assert pool.share(pages[:1]) == []
    assert pool.release(pages) == []
    assert counts(pool) == (7, 1, 0, 0)
    pool.release(pages[:1])
    assert counts(pool) == (8, 0, 0, 0)


def test_kept_pages_stay_cached_in_the_order_given_until_shared_or_reclaimed(pool):
    a, b, c = pool.allocate(3)
    assert pool.release([c, a, b], kept(a, c)) == [c, a]
    assert counts(pool) == (6, 0, 2, 0)
    assert pool.num_available == 8
    assert pool.num_held([a, c]) == 0
    assert pool.share([a]) == [a]
    assert pool.num_held([a, c]) == 1
    pool.reclaim([c])
    assert counts(pool) == (7, 1, 0, 0)
    assert pool.num_references(a) == 1


def test_a_cached_page_can_change_hands_without_having_been_free(pool):
    a, b, _ = pool.allocate(3)
    pool.release([a, b], kept(a, b))
    pool.take_over([b])
    assert counts(pool) == (5, 2, 1, 0)
    assert pool.num_references(b) == 1
    assert pool.is_cached(a)


def test_an_owned_page_is_not_there_to_be_taken():
    pool = PagePool(num_pages=9, page_size=4)
    a, b = pool.allocate(2)
    pool.release([a], kept(a))
    pool.take_over([b])
    with pytest.raises(AssertionError, match="not there"):
        pool.flush()


def test_a_page_is_released_only_by_an_owner(pool):
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(AssertionError, match="not owned"):
        pool.release([page])


def test_pages_in_transfer_belong_to_nobody(pool):
    pages = pool.allocate(3)
    pool.begin_transfer(pages[:2])
    assert counts(pool) == (5, 1, 0, 2)
    pool.check_integrity()
    pool.end_transfer(pages[:1], owned=True)
    pool.end_transfer(pages[1:2], owned=False)
    assert counts(pool) == (6, 2, 0, 0)


def test_a_shared_page_is_not_transferred(pool):
    (page,) = pool.allocate(1)
    pool.share([page])
    with pytest.raises(AssertionError, match="shared"):
        pool.begin_transfer([page])


def test_a_growing_sequence_gets_pages_in_a_row(pool):
    a, b = pool.allocate(2)
    assert (a, b) == (1, 2)
    assert pool.allocate_each([a, b], run=3) == [3, 6]
    assert pool.num_not_kept == 0
    assert counts(pool) == (4, 4, 0, 0)
    assert pool.allocate_each([3, 6], run=3) == [4, 7]
    assert pool.allocate_each([4], run=3) == [5]


def test_kept_pages_are_taken_by_whoever_finds_no_others(pool):
    assert pool.allocate_each([0], run=8) == [1]
    assert counts(pool) == (7, 1, 0, 0)
    assert sorted(pool.allocate(7)) == list(range(2, 9))
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_a_row_without_a_run_takes_one_of_another_row_when_nothing_else_is_free(pool):
    pool.allocate_each([0], run=8)
    (page,) = pool.allocate_each([0], run=8)
    assert counts(pool) == (6, 2, 0, 0)
    # What was kept for the first row is kept for the second one now.
    assert pool.allocate_each([page], run=8) == [page + 1]


def test_a_run_given_up_is_taken_next_and_in_order(pool):
    a, b = pool.allocate_each([0, 0], run=4)
    assert (a, b) == (1, 5)
    pool.give_up_run(a)
    pool.give_up_run(a)
    assert pool.num_not_kept == 3
    assert pool.allocate(3) == [2, 3, 4]


def test_a_run_ends_where_the_next_page_is_not_free(pool):
    pages = pool.allocate(8)
    pool.release([pages[6], pages[5], pages[2]])
    assert pool.allocate_each([0], run=8) == [3]
    assert pool.num_not_kept == 2


def test_the_check_finds_a_page_kept_that_is_not_free():
    pool = PagePool(num_pages=9, page_size=4)
    (page,) = pool.allocate_each([0], run=4)
    pool._runs[page] = page + 8
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_the_check_finds_a_page_in_two_places():
    pool = PagePool(num_pages=9, page_size=4)
    (page,) = pool.allocate(1)
    pool._free.append(page)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_the_check_finds_a_lost_page():
    pool = PagePool(num_pages=9, page_size=4)
    pool._free.pop()
    with pytest.raises(AssertionError):
        pool.check_integrity()
