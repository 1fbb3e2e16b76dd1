"""The rows that decode, by column: what a plan begins from without looking at each of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import overload

import numpy as np
from numpy.typing import NDArray

from octavo.engine.outputs import RequestMetrics
from octavo.engine.request import Request
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.row_columns import RowColumns
from octavo.engine.scheduler.rows import Rows, is_kept

_turn = attrgetter("turn")


class DecodingRows(Sequence[LiveRequest]):
    """Entries that decode, in the order in which they began to.

    Those whose last token was planned stay among them until it is committed, but stand apart: no
    step computes them any more.

    Args:
        columns: the rows' figures.
    """

    def __init__(self, columns: RowColumns) -> None:
        self._columns = columns
        self._num_appended = 0
        # Of those that go on, side by side: a plan takes copies of the lists as they are.
        self._entries: list[LiveRequest] = []
        self._requests: list[Request] = []
        self._outputs: list[list[int]] = []
        self._metrics: list[RequestMetrics] = []
        self._slots = np.zeros(len(columns.number), np.intp)
        self._rows: Rows | None = None
        """As they were when last asked for, until somebody comes or goes."""
        self._first: Rows | None = None
        """The same, until somebody goes: since then the first of the lists."""
        self._prepared: Rows | None = None
        self._ending: dict[int, LiveRequest] = {}

    def __len__(self) -> int:
        return len(self._entries) + len(self._ending)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._all())

    @overload
    def __getitem__(self, index: int) -> LiveRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[LiveRequest]: ...
    def __getitem__(self, index: int | slice) -> LiveRequest | list[LiveRequest]:
        return self._all()[index]

    def _all(self) -> list[LiveRequest]:
        if not self._ending:
            return self._entries
        return sorted([*self._entries, *self._ending.values()], key=_turn)

    @property
    def num_ending(self) -> int:
        """Those whose last token was planned."""
        return len(self._ending)

    def append(self, entry: LiveRequest) -> None:
        """A row, whose known tokens have all been planned, begins to decode."""
        request, slot = entry.request, entry.request.slot
        assert slot is not None
        entry.turn = self._num_appended
        self._num_appended += 1
        if entry.prefill_end >= entry.last_position:
            self._ending[entry.number] = entry
            return
        self._slots[len(self._entries)] = slot
        self._entries.append(entry)
        self._requests.append(request)
        self._outputs.append(request.output_token_ids)
        self._metrics.append(request.metrics)
        self._rows = None

    def end(self, rows: Rows, is_ending: NDArray[np.bool_]) -> list[int]:
        """The last tokens of some rows were planned.

        Args:
            rows: as `rows` gave them, or less.
            is_ending: bool[rows], which of them.

        Returns:
            Their indices, ascending.
        """
        indices: list[int] = is_ending.nonzero()[0].tolist()
        if not indices:
            return indices
        if rows is self._first:
            ending = [self._entries[index] for index in indices]
            num_rows, size, slots = len(rows), len(self._entries), self._slots
            for index in reversed(indices):
                self._delete(index)
            left = num_rows - len(indices)
            slots[:left] = rows.slots[~is_ending]
            slots[left : size - len(indices)] = slots[num_rows:size]
            self._rows = self._first = None
        else:
            places = [self._requests.index(rows.requests[index]) for index in indices]
            ending = [self._entries[place] for place in places]
            for entry in ending:
                self.remove(entry)
        for entry in ending:
            self._ending[entry.number] = entry
        return indices

    def remove(self, entry: LiveRequest) -> None:
        """A row, which must be one of these, ends."""
        if self._ending.pop(entry.number, None) is not None:
            return
        index, size, slots = self._entries.index(entry), len(self._entries), self._slots
        self._delete(index)
        slots[index : size - 1] = slots[index + 1 : size]
        self._rows = self._first = None

    def _delete(self, index: int) -> None:
        del self._entries[index], self._requests[index]
        del self._outputs[index], self._metrics[index]

    def rows(self) -> Rows:
        """Those that go on, as they stand now."""
        rows, prepared = self._rows, self._prepared
        if prepared is not None:
            self._prepared = None
            if prepared is rows:
                return rows
        if rows is None:
            rows = Rows.of(
                tuple(self._requests),
                tuple(self._outputs),
                tuple(self._metrics),
                self._slots[: len(self._entries)].copy(),
                self._columns,
            )
        else:
            rows = rows.at(self._columns.num_computed[rows.slots])
        self._rows = self._first = rows
        return rows

    def prepare(self, *, paced: bool) -> None:
        """Works out what `rows` will return when it is called next.

        No row may move ahead, or be given pages, until then; rows may come and go.

        Args:
            paced: whether it will be asked when their tokens are due.
        """
        self._prepared = None
        self._prepared = rows = self.rows()
        rows.full(self._columns)
        _ = rows.context
        self._columns.begun.clear()
        if paced:
            rows.least_due_s(self._columns)

    def all_rows(self) -> Rows:
        """All of them, as they stand now."""
        if not self._ending:
            return self.rows()
        entries, requests = self._entries.copy(), self._requests.copy()
        outputs, metrics = self._outputs.copy(), self._metrics.copy()
        indices: list[int] = []
        for entry in sorted(self._ending.values(), key=_turn):
            index, request = bisect_left(entries, entry.turn, key=_turn), entry.request
            indices.append(index)
            entries.insert(index, entry)
            requests.insert(index, request)
            outputs.insert(index, request.output_token_ids)
            metrics.insert(index, request.metrics)
        slots = np.empty(len(entries), np.intp)
        slots[is_kept(len(entries), indices)] = self._slots[: len(self._entries)]
        slots[indices] = [entries[index].request.slot for index in indices]
        return Rows.of(tuple(requests), tuple(outputs), tuple(metrics), slots, self._columns)

    def check_integrity(self) -> None:
        """Asserts that the columns agree with the entries."""
        slots = [entry.request.slot for entry in self._entries]
        assert self._slots[: len(slots)].tolist() == slots
        requests = [entry.request for entry in self._entries]
        assert self._requests == requests
        assert all(
            output is request.output_token_ids and metrics is request.metrics
            for output, metrics, request in zip(self._outputs, self._metrics, requests, strict=True)
        )
        for entry in self._entries:
            assert entry.request.num_computed_tokens < entry.last_position
        for entry in self._ending.values():
            assert entry.request.num_computed_tokens >= entry.last_position
        if self._rows is not None:
            assert self._rows.requests == tuple(requests)
            assert self._rows.slots.tolist() == slots
