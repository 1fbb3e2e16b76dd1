"""Rows of the device: those that decode, in order and as a plan holds them, and all rows' pages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.engine.kv.page_needs import NEVER
from octavo.engine.output.outputs import RequestMetrics
from octavo.engine.request import Request

Counts = NDArray[np.int32]
"""An array of numbers of tokens, pages or steps."""

Slots = NDArray[np.intp]
"""An array of slots, of the type that NumPy indexes with."""

Item = TypeVar("Item")


@dataclass(slots=True, kw_only=True, eq=False)
class Rows:
    """Decode rows of a plan, as the row table had them when it was made. For reading only.

    Attributes:
        requests: whose they are.
        outputs, metrics: of the requests: what every commit adds to.
        slots: intp[rows], theirs.
        starts: int32[rows], the positions of their inputs.
        ends: int32[rows], where they end: `LiveRequest.last_position`.
        numbers: int64[rows], their requests' numbers.
        is_row: int32[slots of the device], 1 where one of these is, else 0.
        context: positions that they attend to, all together.
    """

    requests: tuple[Request, ...]
    outputs: tuple[list[int], ...]
    metrics: tuple[RequestMetrics, ...]
    slots: NDArray[np.intp]
    starts: NDArray[np.int32]
    ends: NDArray[np.int32]
    numbers: NDArray[np.int64]
    is_row: NDArray[np.int32]
    context: float

    def __len__(self) -> int:
        return len(self.requests)

    def at(self, starts: NDArray[np.int32]) -> Rows:
        """The same rows, further on."""
        return Rows(
            requests=self.requests,
            outputs=self.outputs,
            metrics=self.metrics,
            slots=self.slots,
            starts=starts,
            ends=self.ends,
            numbers=self.numbers,
            is_row=self.is_row,
            context=float(starts.sum()),
        )

    def without(self, left_out: Sequence[int]) -> Rows:
        """All but those at these indices, ascending."""
        if not len(left_out):
            return self
        kept = is_kept(len(self.requests), left_out)
        is_row, starts = self.is_row.copy(), self.starts[kept]
        is_row[self.slots[left_out]] = 0
        return Rows(
            requests=tuple(all_but(self.requests, left_out)),
            outputs=tuple(all_but(self.outputs, left_out)),
            metrics=tuple(all_but(self.metrics, left_out)),
            slots=self.slots[kept],
            starts=starts,
            ends=self.ends[kept],
            numbers=self.numbers[kept],
            is_row=is_row,
            context=float(starts.sum()),
        )


class DecodeOrder:
    """Requests that decode on, in the order in which they began to, as lists side by side: a plan
    takes copies of them as they are.

    Args:
        num_slots: the most requests.

    Attributes:
        requests, outputs, metrics: as in `Rows`. For reading only.
    """

    def __init__(self, num_slots: int) -> None:
        self.requests: list[Request] = []
        self.outputs: list[list[int]] = []
        self.metrics: list[RequestMetrics] = []
        self._turns: list[int] = []
        self._slots = np.zeros(num_slots, np.intp)

    def slots(self) -> NDArray[np.intp]:
        """Their slots, as a new array."""
        return self._slots[: len(self._turns)].copy()

    def insert(self, turn: int, request: Request) -> None:
        """A request that holds a slot begins to decode, the `turn`-th ever."""
        turns, slots, slot = self._turns, self._slots, request.slot
        index, size = bisect_left(turns, turn), len(turns)
        assert slot is not None, request.request_id
        if index < size:
            slots[index + 1 : size + 1] = slots[index:size]
        slots[index] = slot
        turns.insert(index, turn)
        self.requests.insert(index, request)
        self.outputs.insert(index, request.output_token_ids)
        self.metrics.insert(index, request.metrics)

    def remove(self, turn: int) -> None:
        """A request decodes no longer."""
        turns, slots = self._turns, self._slots
        index, size = bisect_left(turns, turn), len(turns)
        assert turns[index] == turn
        del turns[index], self.requests[index], self.outputs[index], self.metrics[index]
        slots[index : size - 1] = slots[index + 1 : size]

    def copy(self) -> DecodeOrder:
        """These requests, in lists of their own."""
        other = DecodeOrder(0)
        other.requests, other.outputs = self.requests.copy(), self.outputs.copy()
        other.metrics, other._turns = self.metrics.copy(), self._turns.copy()
        other._slots = self._slots.copy()
        return other

    def check_integrity(self, expected: list[tuple[int, Request]]) -> None:
        """Asserts that these requests are here, each with its turn, in order, and no others."""
        assert list(zip(self._turns, self.requests, strict=True)) == sorted(
            expected, key=lambda item: item[0]
        )
        assert self.slots().tolist() == [request.slot for request in self.requests]
        columns = zip(self.requests, self.outputs, self.metrics, strict=True)
        for request, output, metrics in columns:
            assert output is request.output_token_ids
            assert metrics is request.metrics


def all_but(items: Sequence[Item], left_out: Sequence[int]) -> list[Item]:
    """The items without those at these indices, ascending."""
    kept = list(items)
    for index in reversed(left_out):
        del kept[index]
    return kept


def is_kept(size: int, left_out: Sequence[int]) -> NDArray[np.bool_]:
    """bool[size], whether each item is kept."""
    kept = np.empty(size, np.bool_)
    kept.fill(True)
    kept[left_out] = False
    return kept


def _no_rows() -> Rows:
    no_counts = np.empty(0, np.int32)
    return Rows(
        requests=(),
        outputs=(),
        metrics=(),
        slots=np.empty(0, np.intp),
        starts=no_counts,
        ends=no_counts,
        numbers=np.empty(0, np.int64),
        is_row=no_counts,
        context=0.0,
    )


NO_ROWS = _no_rows()


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

        The sequences' own lists get theirs by `hand_out`: each is somewhere else in memory, and the
        plan does not wait for that.

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
