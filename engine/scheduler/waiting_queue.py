"""Requests that hold no slot, in the policy's order where that order is fixed, and by tenant."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import overload

from octavo.engine.request import Request
from octavo.engine.scheduler.live_request import LiveRequest, Place
from octavo.engine.scheduler.tenant_lines import Kind, TenantLines
from octavo.engine.scheduler.tenants import TenantCounters
from octavo.engine.scheduler.waiting_columns import WaitingColumns, WaitingFigures

_Key = tuple[Place, int]
_key: Callable[[LiveRequest], _Key] = attrgetter("place", "number")


class _Requests(Sequence[Request]):
    """The requests of a list of entries, as it stands."""

    def __init__(self, entries: list[LiveRequest]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if isinstance(index, slice):
            return [entry.request for entry in self._entries[index]]
        return self._entries[index].request

    def __iter__(self) -> Iterator[Request]:
        return (entry.request for entry in self._entries)


class WaitingQueue:
    """A sorted queue: O(log n) comparisons to insert, remove or look at the head.

    An entry keeps the place it was inserted with until it is removed. What its tenant was served
    moves on while it waits, and is in no place: `lines` has each tenant's entries apart.

    Args:
        place: an entry's place; equal ones stand in order of acceptance.
        measure: figures to keep of an entry that has its place, or None.
        has_due: whether a request has a due time, for the order of turns; None if none has.
        tenants: what each tenant was served.

    Attributes:
        entries: the waiting ones in order of their places; for reading only.
        lines: the same ones by tenant.
        requests: theirs: a view of them.
        columns: their figures, in the same order; empty without `measure`.
    """

    def __init__(
        self,
        place: Callable[[LiveRequest], Place],
        measure: Callable[[LiveRequest], WaitingFigures] | None = None,
        has_due: Callable[[Request], bool] | None = None,
        tenants: TenantCounters | None = None,
    ) -> None:
        self._place = place
        self._has_due = has_due
        self._measure = measure
        self.columns = WaitingColumns()
        self.lines = TenantLines(tenants or TenantCounters())
        # One list: whoever leaves the front moves all that are in it.
        self.entries: list[LiveRequest] = []
        self.requests: Sequence[Request] = _Requests(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> LiveRequest:
        return self.entries[index]

    def key(self, index: int) -> _Key:
        """Place and number of an entry."""
        return _key(self.entries[index])

    @property
    def head(self) -> LiveRequest:
        """The first entry; the queue must not be empty."""
        return self.entries[0]

    def insert(self, entry: LiveRequest) -> None:
        """Puts an entry in its place: for a preempted one, where it stood before."""
        self.lines.flush()  # an entry that has left is found in its line by the place it had
        entry.place = self._place(entry)
        entry.num_queued_reusable = entry.request.num_reusable_tokens
        entries, key = self.entries, _key(entry)
        # Who comes last by arrival comes last, as a rule.
        is_last = not entries or _key(entries[-1]) < key
        index = len(entries) if is_last else bisect_left(entries, key, key=_key)
        entries.insert(index, entry)
        if self._measure is not None:
            self.columns.insert(index, self._measure(entry))
        self.lines.insert(entry, self._kind(entry))

    def _kind(self, entry: LiveRequest) -> Kind:
        if entry.is_pinned:
            return Kind.PINNED
        if entry.is_demoted:
            return Kind.DEMOTED
        has_due = self._has_due is not None and self._has_due(entry.request)
        return Kind.DUE if has_due else Kind.OPEN

    def remove(self, entry: LiveRequest) -> None:
        """Takes an entry out; it must be in the queue."""
        index = 0  # who is admitted comes first, as a rule
        if self.entries[0] is not entry:
            index = bisect_left(self.entries, _key(entry), key=_key)
            assert self.entries[index] is entry, entry.request.request_id
        del self.entries[index]
        if self._measure is not None:
            self.columns.remove(index)
        self.lines.remove(entry)

    def flush(self) -> None:
        """Does what those who left first have left to be done."""
        self.columns.flush()
        self.lines.flush()

    def pin(self, entry: LiveRequest) -> None:
        """Sends an entry to the front, behind those pinned before, for as long as it lives."""
        self.remove(entry)
        entry.is_pinned = True
        self.insert(entry)

    def replace(self, entry: LiveRequest) -> None:
        """Puts an entry in its place anew, after its own has changed."""
        self.remove(entry)
        self.insert(entry)

    def reorder(
        self,
        measure: Callable[[LiveRequest], WaitingFigures] | None,
        has_due: Callable[[Request], bool] | None,
    ) -> None:
        """Puts every entry in its place anew, after places changed.

        Args:
            measure, has_due: as at construction; they take the place of those before.
        """
        entries = self.entries.copy()
        self._has_due = has_due
        self.lines.clear()
        self.entries.clear()
        self.columns.clear()
        self._measure = measure
        for entry in sorted(entries, key=lambda entry: entry.number):
            self.insert(entry)

    def check_integrity(self) -> None:
        """Asserts that the queue is sorted and its columns agree."""
        keys = [_key(entry) for entry in self.entries]
        assert keys == sorted(set(keys))
        assert len(self.columns) == (0 if self._measure is None else len(self))
        self.lines.check_integrity(self.entries)
