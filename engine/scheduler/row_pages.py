"""Pages of the device's rows: how many tokens they have room for, and who gets more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.kv.page_needs import NEVER

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
        num_groups: cache groups, of which each row has a table of pages. All grow together.

    Attributes:
        capacity: int32[slots], tokens that each row's pages have room for.
        gives_back_at: int32[slots], position from which on each row has pages behind a window.
        tables: each row's pages, `SequencePages.tables`, those of a row side by side. Pages of the
            newest `grow` are missing until `hand_out`.
    """

    def __init__(self, num_slots: int, page_size: int, num_groups: int = 1) -> None:
        self._page_size = page_size
        self._num_groups = num_groups
        self.capacity: Counts = np.zeros(num_slots, np.int32)
        self.gives_back_at: Counts = np.full(num_slots, NEVER, np.int32)
        self.tables: list[list[int]] = [[] for _ in range(num_slots * num_groups)]
        self._slots_to_grow: list[int] = []
        self._new_pages: list[int] = []
        self._num_widened = 0  # of the slots to grow; the capacity of the others is missing

    def enter(self, slot: int, *tables: list[int]) -> None:
        """A sequence that has these tables, one a cache group, takes a slot. It shares the lists
        from now on."""
        first = slot * self._num_groups
        self.tables[first : first + self._num_groups] = tables
        self.capacity[slot] = min(map(len, tables)) * self._page_size
        self.gives_back_at[slot] = NEVER

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
        """Pages that each of these rows has, of each cache group."""
        counts: list[int] = (self.capacity[slots] // self._page_size).tolist()
        return counts

    def last_pages(self, slots: list[int]) -> list[int]:
        """The last page of each of these rows, of each cache group in turn."""
        return [self.tables[index][-1] for index in self._tables_of(slots)]

    def _tables_of(self, slots: list[int]) -> list[int]:
        """Where these rows' tables are."""
        num_groups = self._num_groups
        if num_groups == 1:
            return slots
        return [slot * num_groups + group for slot in slots for group in range(num_groups)]

    def has_grown(self, slot: int, num_pages: int) -> None:
        """The sequence in a slot was given so many pages more, of each cache group."""
        self.capacity[slot] += num_pages * self._page_size

    def grow(
        self, slots: list[int], num_pages: list[int], pages: list[int]
    ) -> Iterable[tuple[int, ...]]:
        """Gives each of these rows, which has so many pages, one more of each cache group.

        The sequences' own lists get theirs by `hand_out`: each is somewhere else in memory, and
        nobody who waits for a plan need wait for that.

        Returns:
            (slot, index in the row, page id of each group) of each.
        """
        self._slots_to_grow += slots
        self._new_pages += pages
        by_group = [pages[group :: self._num_groups] for group in range(self._num_groups)]
        return zip(slots, num_pages, *by_group, strict=True)

    def hand_out(self) -> None:
        """Gives rows and sequences the pages that they have got."""
        if not self._new_pages:
            return
        self._widen()
        self._num_widened = 0
        tables = self.tables
        growing = self._tables_of(self._slots_to_grow)
        for index, page in zip(growing, self._new_pages, strict=True):
            tables[index].append(page)
        self._slots_to_grow.clear()
        self._new_pages.clear()

    def _widen(self) -> None:
        """Counts in `capacity` the pages that rows have got."""
        slots = self._slots_to_grow[self._num_widened :]
        if slots:
            self.capacity[slots] += self._page_size
            self._num_widened = len(self._slots_to_grow)

    def check_integrity(self, slot: int, *tables: list[int]) -> None:
        """Asserts that the sequence in a slot has these tables, and that they are counted."""
        first = slot * self._num_groups
        held = self.tables[first : first + self._num_groups]
        assert all(table is other for table, other in zip(held, tables, strict=True))
        assert self.capacity[slot] == min(map(len, tables)) * self._page_size
