"""The rows that decode, by column: what a plan begins from without looking at each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from octavo.engine.outputs import RequestMetrics
from octavo.engine.request import Request
from octavo.engine.scheduler.live_request import LiveRequest

Item = TypeVar("Item")


class Rows:
    """Decode rows of a plan being made.

    Attributes:
        entries, requests: whose they are.
        outputs, metrics: of the requests: what every commit adds to.
        slots: intp[rows], theirs. Read only.
        starts: int32[rows], the positions of their inputs. Read only.
    """

    __slots__ = ("_context", "entries", "metrics", "outputs", "requests", "slots", "starts")

    def __init__(
        self,
        entries: tuple[LiveRequest, ...],
        requests: tuple[Request, ...],
        outputs: tuple[list[int], ...],
        metrics: tuple[RequestMetrics, ...],
        slots: NDArray[np.intp],
        starts: NDArray[np.int32],
    ) -> None:
        self.entries = entries
        self.requests = requests
        self.outputs = outputs
        self.metrics = metrics
        self.slots = slots
        self.starts = starts
        self._context: float | None = None

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def context(self) -> float:
        """Positions that they attend to, all together."""
        if self._context is None:
            self._context = float(self.starts.sum())
        return self._context

    def at(self, starts: NDArray[np.int32]) -> Rows:
        """The same rows, further on."""
        return Rows(self.entries, self.requests, self.outputs, self.metrics, self.slots, starts)

    def without(self, left_out: Sequence[int]) -> Rows:
        """All but those at these indices, ascending."""
        if not len(left_out):
            return self
        kept = is_kept(len(self.entries), left_out)
        return Rows(
            all_but(self.entries, left_out),
            all_but(self.requests, left_out),
            all_but(self.outputs, left_out),
            all_but(self.metrics, left_out),
            self.slots[kept],
            self.starts[kept],
        )


def all_but(items: Sequence[Item], left_out: Sequence[int]) -> tuple[Item, ...]:
    """The items without those at these indices, ascending."""
    kept: list[Item] = []
    begin = 0
    for index in left_out:
        kept += items[begin:index]
        begin = index + 1
    kept += items[begin:]
    return tuple(kept)


def is_kept(size: int, left_out: Sequence[int]) -> NDArray[np.bool_]:
    """bool[size], whether each item is kept."""
    kept = np.ones(size, np.bool_)
    kept[left_out] = False
    return kept


NO_ROWS = Rows((), (), (), (), np.empty(0, np.intp), np.empty(0, np.int32))


class DecodingRows(Sequence[LiveRequest]):
    """Entries that decode, in the order in which they began to.

    Args:
        num_slots: rows of the device state.
    """

    def __init__(self, num_slots: int) -> None:
        self._entries: list[LiveRequest] = []
        self._slots = np.zeros(num_slots, np.intp)
        self._rows: Rows | None = None
        """As they were when last asked for, until somebody comes or goes."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._entries)

    @overload
    def __getitem__(self, index: int) -> LiveRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[LiveRequest]: ...
    def __getitem__(self, index: int | slice) -> LiveRequest | list[LiveRequest]:
        return self._entries[index]

    def append(self, entry: LiveRequest) -> None:
        """A row begins to decode."""
        assert entry.request.slot is not None
        self._slots[len(self._entries)] = entry.request.slot
        self._entries.append(entry)
        self._rows = None

    def remove(self, entry: LiveRequest) -> None:
        """A row, which must be one of these, ends."""
        size, slots = len(self._entries), self._slots
        index = int((slots[:size] == entry.request.slot).argmax())
        assert self._entries[index] is entry
        del self._entries[index]
        slots[index : size - 1] = slots[index + 1 : size]
        self._rows = None

    def rows(self, num_computed: NDArray[np.int32]) -> Rows:
        """All of them, as they stand now.

        Args:
            num_computed: int32[slots], positions that are computed.
        """
        rows = self._rows
        if rows is None:
            requests = tuple([entry.request for entry in self._entries])
            slots = self._slots[: len(self._entries)].copy()
            outputs = tuple([request.output_token_ids for request in requests])
            metrics = tuple([request.metrics for request in requests])
            entries = tuple(self._entries)
            rows = Rows(entries, requests, outputs, metrics, slots, num_computed[slots])
        else:
            rows = rows.at(num_computed[rows.slots])
        self._rows = rows
        return rows

    def check_integrity(self) -> None:
        """Asserts that the columns agree with the entries."""
        slots = [entry.request.slot for entry in self._entries]
        assert self._slots[: len(slots)].tolist() == slots
        if self._rows is not None:
            assert self._rows.entries == tuple(self._entries)
            assert self._rows.requests == tuple(entry.request for entry in self._entries)
            assert self._rows.slots.tolist() == slots
