"""Requests that hold no slot, kept in the policy's order where that order is fixed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from octavo.engine.request import Request
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.policies.policy import Place

_Key = tuple[Place, int]


class WaitingQueue:
    """A sorted queue: O(log n) comparisons to insert, remove or look at the head.

    Args:
        place: a request's fixed place, or None to keep the order of acceptance (a policy whose
            order moves sorts by itself).
    """

    def __init__(self, place: Callable[[Request], Place] | None) -> None:
        self._place = place
        self._keys: list[_Key] = []
        self._entries: list[LiveRequest] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._entries)

    @property
    def head(self) -> LiveRequest:
        """The first entry; the queue must not be empty."""
        return self._entries[0]

    def insert(self, entry: LiveRequest) -> None:
        """Puts an entry in its place: for a preempted one, where it stood before."""
        key = self._key(entry)
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._entries.insert(index, entry)

    def remove(self, entry: LiveRequest) -> None:
        """Takes an entry out; it must be in the queue."""
        index = bisect_left(self._keys, self._key(entry))
        assert self._entries[index] is entry, entry.request.request_id
        del self._keys[index]
        del self._entries[index]

    def in_order_of_acceptance(self) -> tuple[Request, ...]:
        """Every waiting request, first accepted first."""
        entries = sorted(self._entries, key=lambda entry: entry.number)
        return tuple(entry.request for entry in entries)

    def check_integrity(self) -> None:
        """Asserts that the queue is sorted and its places have not moved."""
        assert self._keys == [self._key(entry) for entry in self._entries]
        assert self._keys == sorted(set(self._keys))

    def _key(self, entry: LiveRequest) -> _Key:
        return (self._place(entry.request) if self._place else (), entry.number)
