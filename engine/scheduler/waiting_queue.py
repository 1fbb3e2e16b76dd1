"""Requests that hold no slot, kept in the policy's order where that order is fixed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from octavo.engine.request import Request
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.policies.policy import Place
from octavo.engine.scheduler.waiting_columns import WaitingColumns, WaitingFigures

_Key = tuple[Place, int]


class WaitingQueue:
    """A sorted queue: O(log n) comparisons to insert, remove or look at the head.

    An entry keeps the place it was inserted with until it is removed.

    Args:
        place: an entry's place; equal ones stand in order of acceptance.
        measure: figures to keep of an entry that has its place, or None.

    Attributes:
        entries, requests: the waiting ones in order; for reading only.
        columns: their figures, in the same order; empty without `measure`.
    """

    def __init__(
        self,
        place: Callable[[LiveRequest], Place],
        measure: Callable[[LiveRequest], WaitingFigures] | None = None,
    ) -> None:
        self._place = place
        self._measure = measure
        self.columns = WaitingColumns()
        self._keys: list[_Key] = []
        self.entries: list[LiveRequest] = []
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> LiveRequest:
        return self.entries[index]

    def key(self, index: int) -> _Key:
        """Place and number of an entry."""
        return self._keys[index]

    @property
    def head(self) -> LiveRequest:
        """The first entry; the queue must not be empty."""
        return self.entries[0]

    def insert(self, entry: LiveRequest) -> None:
        """Puts an entry in its place: for a preempted one, where it stood before."""
        entry.place = self._place(entry)
        key = (entry.place, entry.number)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self.entries.insert(index, entry)
        self.requests.insert(index, entry.request)
        if self._measure is not None:
            self.columns.insert(index, self._measure(entry))

    def remove(self, entry: LiveRequest) -> None:
        """Takes an entry out; it must be in the queue."""
        index = 0  # who is admitted comes first, as a rule
        if self.entries[0] is not entry:
            index = bisect_left(self._keys, (entry.place, entry.number))
            assert self.entries[index] is entry, entry.request.request_id
        del self._keys[index]
        del self.entries[index]
        del self.requests[index]
        if self._measure is not None:
            self.columns.remove(index)

    def demote(self, entry: LiveRequest) -> None:
        """Sends an entry behind all that are not demoted, for as long as it lives."""
        self.remove(entry)
        entry.is_demoted = True
        self.insert(entry)

    def pin(self, entry: LiveRequest) -> None:
        """Sends an entry to the front, behind those pinned before, for as long as it lives."""
        self.remove(entry)
        entry.is_pinned = True
        self.insert(entry)

    def reorder(self, measure: Callable[[LiveRequest], WaitingFigures] | None) -> None:
        """Puts every entry in its place anew, after places changed.

        Args:
            measure: as at construction; it takes the place of the one before.
        """
        entries, self.entries = self.entries, []
        self._keys.clear()
        self.requests.clear()
        self.columns.clear()
        self._measure = measure
        for entry in sorted(entries, key=lambda entry: entry.number):
            self.insert(entry)

    def check_integrity(self) -> None:
        """Asserts that the queue is sorted and its columns agree."""
        assert self._keys == [(entry.place, entry.number) for entry in self.entries]
        assert self._keys == sorted(set(self._keys))
        assert self.requests == [entry.request for entry in self.entries]
        assert len(self.columns) == (0 if self._measure is None else len(self))
