"""Pages by number of tokens, counted against sequences that are stepped through."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.kv.page_needs import PageNeeds

GEMMA = (None, *(512,) * 5)


def seen(page_size: int, window: int | None, first: int, end: int) -> int:
    """Pages that queries at positions first … end - 1 see together, one by one."""
    pages = set()
    for position in range(first, end):
        start = 0 if window is None else max(0, position - window + 1)
        pages |= set(range(start // page_size, position // page_size + 1))
    return len(pages)


def test_one_group_that_sees_everything_holds_all_pages() -> None:
    needs = PageNeeds(16, (None,), 64)
    assert needs.is_plain
    for num_tokens in (1, 16, 17, 4096):
        assert needs.held(num_tokens) == needs.to_compute(num_tokens) == -(-num_tokens // 16)
        assert needs.mean_held(num_tokens) == num_tokens / 16
    assert needs.first_seen(None, 1000) == 0


def test_a_window_holds_its_own_length_and_one_page() -> None:
    needs = PageNeeds(16, GEMMA, 256)
    assert needs.held(512) == 6 * 32
    assert needs.held(4096) == 256 + 5 * 33
    assert needs.to_compute(4096) == 256 + 5 * 49
    assert needs.held_each(np.array([512.0, 4096.0])).tolist() == [6 * 32, 256 + 5 * 33]
    assert needs.mean_held(4096) == needs.mean_held_each(np.array([4096.0]))[0] == 256 + 5 * 32


@given(
    page_size=st.sampled_from([1, 2, 8]),
    window=st.integers(1, 40),
    chunk=st.integers(1, 20),
    position=st.integers(0, 100),
)
def test_the_most_pages_in_a_window_are_never_passed(
    page_size: int, window: int, chunk: int, position: int
) -> None:
    needs = PageNeeds(page_size, (window,), chunk)
    count = seen(page_size, window, position, position + chunk)
    assert count <= needs.most_in(window, chunk)
    # And a place exists at which all of them are seen.
    counts = [
        seen(page_size, window, 200 + start, 200 + start + chunk) for start in range(page_size)
    ]
    assert max(counts) == needs.most_in(window, chunk)


@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 30)), min_size=1, max_size=3),
    num_pages=st.integers(0, 60),
    chunk=st.integers(1, 12),
)
def test_the_longest_sequence_fits_and_the_next_longer_does_not(
    windows: list[int | None], num_pages: int, chunk: int
) -> None:
    needs = PageNeeds(4, tuple(windows), chunk)
    most = needs.most_tokens(num_pages, 32)
    assert needs.to_compute(most) <= num_pages
    assert most == 32 * 4 or needs.to_compute(most + 1) > num_pages


@pytest.mark.parametrize("windows", [(None,), (16,), (None, 16, 16)])
def test_more_tokens_never_hold_fewer_pages(windows: tuple[int | None, ...]) -> None:
    needs = PageNeeds(4, windows, 8)
    for count in (needs.held, needs.to_compute):
        pages = [count(num_tokens) for num_tokens in range(100)]
        assert pages == sorted(pages)
    assert all(needs.held(n) <= needs.to_compute(n) for n in range(100))
