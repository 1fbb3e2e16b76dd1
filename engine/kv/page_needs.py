"""How many pages a sequence holds: the one place where tokens become pages.

A page is so many tokens of one cache group's layers (`octavo.models.cache_groups`). A group that
sees everything keeps all pages of a sequence, a group with a window those that its next query sees.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEVER = 2**31 - 1
"""A position that no sequence comes to."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """Pages by number of tokens.

    Attributes:
        page_size: tokens in a page.
        windows: by group, tokens that a query sees, itself included; None for all.
        chunk_tokens: most tokens of a sequence that one step computes of its prompt.
    """

    page_size: int
    windows: tuple[int | None, ...] = (None,)
    chunk_tokens: int = 1

    def __post_init__(self) -> None:
        assert self.windows, "a model without caches"
        assert all(window is None or window >= 1 for window in self.windows), self.windows

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def is_plain(self) -> bool:
        """Whether there is one group, which sees everything."""
        return self.windows == (None,)

    @property
    def num_whole(self) -> int:
        """Groups that see everything; they come first."""
        return sum(window is None for window in self.windows)

    def num_positions(self, num_tokens: int) -> int:
        """Entries of a block table that `num_tokens` tokens take, in each group."""
        return -(-num_tokens // self.page_size)

    def first_seen(self, window: int | None, position: int) -> int:
        """Index of the first page that a query at a position sees."""
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def most_in(self, window: int, num_tokens: int) -> int:
        """Most pages that queries of `num_tokens` tokens in a row see together."""
        return -(-(window + num_tokens - 2) // self.page_size) + 1

    def held(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` tokens holds at the most while it decodes."""
        return self._count(num_tokens, 1)

    def to_compute(self, num_tokens: int) -> int:
        """Pages that a sequence is given at the most, to compute `num_tokens` known tokens in
        chunks. It never holds more on its way there."""
        return self._count(num_tokens, self.chunk_tokens)

    def most_tokens(self, num_pages: int, most_positions: int) -> int:
        """Tokens of the longest sequence that so many pages hold, as `to_compute` counts.

        Args:
            most_positions: entries of a block table.
        """
        least, most = 0, most_positions
        while least < most:
            middle = (least + most + 1) // 2
            if self.to_compute(middle * self.page_size) <= num_pages:
                least = middle
            else:
                most = middle - 1
        return least * self.page_size

    def _count(self, num_tokens: int, chunk: int) -> int:
        whole = -(-num_tokens // self.page_size)
        if self.windows == (None,):
            return whole
        return sum(
            whole if window is None else min(whole, self.most_in(window, chunk))
            for window in self.windows
        )

    def held_each(self, num_tokens: Floats) -> Floats:
        """As `held`, of many sequences at once."""
        whole: Floats = np.ceil(num_tokens / self.page_size)
        if self.windows == (None,):
            return whole
        each = [
            whole if window is None else np.minimum(whole, self.most_in(window, 1))
            for window in self.windows
        ]
        total: Floats = np.sum(each, axis=0)
        return total

    def mean_held(self, num_tokens: float) -> float:
        """As `held`, were pages of a token's size: what sequences hold in the mean, less what is
        empty of their last pages."""
        if self.windows == (None,):
            return num_tokens / self.page_size
        seen = [
            num_tokens if window is None else min(num_tokens, window) for window in self.windows
        ]
        return sum(seen) / self.page_size

    def mean_held_each(self, num_tokens: Floats) -> Floats:
        """As `mean_held`, of many sequences at once."""
        total: Floats = num_tokens / np.array(float(self.page_size))
        if self.windows == (None,):
            return total
        return np.sum(
            [
                total if window is None else np.minimum(total, window / self.page_size)
                for window in self.windows
            ],
            axis=0,
        )

    def growth(self, num_tokens: float) -> float:
        """Pages, at the most, by which what a sequence holds grows over `num_tokens` tokens, less
        what is empty of its last ones."""
        return num_tokens * len(self.windows) / self.page_size


@functools.cache
def page_needs(
    page_size: int, windows: tuple[int | None, ...] = (None,), chunk_tokens: int = 1
) -> PageNeeds:
    """The needs of a model, made once."""
    return PageNeeds(page_size, windows, chunk_tokens)
