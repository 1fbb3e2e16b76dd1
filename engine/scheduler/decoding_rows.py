"""The rows that decode, by column: what a plan begins from without looking at each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Request
from octavo.engine.scheduler.live_request import LiveRequest

_NO_ROWS = np.empty(0, np.int32)


class Rows(NamedTuple):
    """Decode rows of a plan being made.

    Attributes:
        entries, requests: whose they are.
        slots, starts: int32[rows], theirs, and the positions of their inputs. Read only.
    """

    entries: Sequence[LiveRequest]
    requests: tuple[Request, ...]
    slots: NDArray[np.int32]
    starts: NDArray[np.int32]

    def where(self, keeps: NDArray[np.bool_]) -> Rows:
        """The rows for which `keeps` is true."""
        if keeps.all():
            return self
        kept = np.flatnonzero(keeps)
        entries = [self.entries[index] for index in kept.tolist()]
        requests = tuple([entry.request for entry in entries])
        return Rows(entries, requests, self.slots[kept], self.starts[kept])


NO_ROWS = Rows((), (), _NO_ROWS, _NO_ROWS)


class DecodingRows(Sequence[LiveRequest]):
    """Entries that decode, in the order in which they began to.

    Args:
        num_slots: rows of the device state.
    """

    def __init__(self, num_slots: int) -> None:
        self._entries: list[LiveRequest] = []
        self._slots = np.zeros(num_slots, np.int32)
        self._requests: tuple[Request, ...] | None = ()

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
        self._requests = None

    def remove(self, entry: LiveRequest) -> None:
        """A row, which must be one of these, ends."""
        size, slots = len(self._entries), self._slots
        index = int(np.flatnonzero(slots[:size] == entry.request.slot)[0])
        assert self._entries[index] is entry
        del self._entries[index]
        slots[index : size - 1] = slots[index + 1 : size]
        self._requests = None

    def rows(self, num_computed: NDArray[np.int32]) -> Rows:
        """All of them, as they stand now.

        Args:
            num_computed: int32[slots], positions that are computed.
        """
        if self._requests is None:
            self._requests = tuple([entry.request for entry in self._entries])
        slots = self._slots[: len(self._entries)].copy()
        return Rows(tuple(self._entries), self._requests, slots, num_computed[slots])

    def check_integrity(self) -> None:
        """Asserts that the columns agree with the entries."""
        slots = [entry.request.slot for entry in self._entries]
        assert self._slots[: len(slots)].tolist() == slots
        assert self._requests in (None, tuple(entry.request for entry in self._entries))
