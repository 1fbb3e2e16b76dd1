"""Pages of the device's rows: how many tokens they have room for, and who gets more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int32]
"""An array of numbers of tokens, pages or steps."""

Slots = NDArray[np.intp]
"""An array of slots, of the type that NumPy indexes with."""


class FullRows(NamedTuple):
    """Decode rows whose pages have no room for one more token.

    Attributes:
        indices: theirs among the rows that were asked about, ascending.
        slots: theirs.
        num_pages: pages that each has.
    """

    indices: list[int]
    slots: list[int]
    num_pages: list[int]


class RowPages:
    """The pages of the rows, by slot.

    Args:
        num_slots: rows of the device state.
        page_size: tokens in a page.

    Attributes:
        capacity: int32[slots], tokens that each row's pages have room for.
        page_ids: each row's pages: `SequencePages.page_ids`. Pages of the newest `grow` are missing
            until `hand_out`.
    """

    def __init__(self, num_slots: int, page_size: int) -> None:
        self._page_size = page_size
        self.capacity: Counts = np.zeros(num_slots, np.int32)
        self.page_ids: list[list[int]] = [[] for _ in range(num_slots)]
        self._slots_to_grow: list[int] = []
        self._new_pages: list[int] = []
        self._num_widened = 0  # of the slots to grow; the capacity of the others is missing

    def enter(self, slot: int, page_ids: list[int]) -> None:
        """A sequence that has these pages takes a slot. It shares the list from now on."""
        self.page_ids[slot] = page_ids
        self.capacity[slot] = len(page_ids) * self._page_size

    def full(self, slots: Slots, starts: Counts) -> FullRows:
        """Rows in these slots that have no room for one more token.

        Args:
            starts: int32[rows], the positions of their inputs.
        """
        held = self.capacity[slots]
        indices = (starts >= held).nonzero()[0]
        return FullRows(
            indices.tolist(), slots[indices].tolist(), (held[indices] // self._page_size).tolist()
        )

    def num_missing(self, slots: Slots, ends: Counts) -> Counts:
        """int32[rows], pages that rows in these slots lack to hold the tokens before `ends`."""
        self._widen()
        lacking = ends - self.capacity[slots]
        result: Counts = np.maximum(lacking + self._page_size - 1, 0) // self._page_size
        return result

    def num_pages(self, slots: Slots) -> list[int]:
        """Pages that each of these rows has."""
        counts: list[int] = (self.capacity[slots] // self._page_size).tolist()
        return counts

    def last_pages(self, slots: list[int]) -> list[int]:
        """The last page of each of these rows."""
        return [self.page_ids[slot][-1] for slot in slots]

    def has_grown(self, slot: int, num_pages: int) -> None:
        """The sequence in a slot was given so many pages more."""
        self.capacity[slot] += num_pages * self._page_size

    def grow(
        self, slots: list[int], num_pages: list[int], pages: list[int]
    ) -> Iterable[tuple[int, int, int]]:
        """Gives each of these rows, which has so many pages, one more.

        The sequences' own lists get theirs by `hand_out`: each is somewhere else in memory, and
        nobody who waits for a plan need wait for that.

        Returns:
            (slot, index in the row, page id) of each.
        """
        self._slots_to_grow += slots
        self._new_pages += pages
        return zip(slots, num_pages, pages, strict=True)

    def hand_out(self) -> None:
        """Gives rows and sequences the pages that they have got."""
        if not self._new_pages:
            return
        self._widen()
        self._num_widened = 0
        page_ids = self.page_ids
        for slot, page in zip(self._slots_to_grow, self._new_pages, strict=True):
            page_ids[slot].append(page)
        self._slots_to_grow.clear()
        self._new_pages.clear()

    def _widen(self) -> None:
        """Counts in `capacity` the pages that rows have got."""
        slots = self._slots_to_grow[self._num_widened :]
        if slots:
            self.capacity[slots] += self._page_size
            self._num_widened = len(self._slots_to_grow)

    def check_integrity(self, slot: int, page_ids: list[int]) -> None:
        """Asserts that the sequence in a slot has these pages, and that they are counted."""
        assert self.page_ids[slot] is page_ids
        assert self.capacity[slot] == len(page_ids) * self._page_size
