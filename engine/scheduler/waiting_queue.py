"""Requests that hold no slot: the queue, and where each of them stands in it.

The policy gives a place, tenants take turns, and a request that has waited its longest comes first
whatever the policy says.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from operator import attrgetter
from typing import overload

from octavo.engine.request import Request
from octavo.engine.scheduler.fairness import TenantCounters
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.live_request import LiveRequest, Place
from octavo.engine.scheduler.policy import Policy
from octavo.engine.scheduler.tenant_lines import Kind, TenantLines
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
        """Takes those who left out of their tenants' lines."""
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


_FEW = 64


class MaximumWait:
    """Finds requests that have waited longer than anybody should.

    Args:
        max_wait_s: the longest a request waits, of one stretch, before it is pinned to the top.
        find: the live request with an id, or None.
    """

    def __init__(self, max_wait_s: float, find: Callable[[str], LiveRequest | None]) -> None:
        self.max_wait_s = max_wait_s
        self._find = find
        # By name: records kept here until their time is up would be garbage for minutes, and
        # have Python's collector look for more.
        self._waiting: list[tuple[float, int, str]] = []
        self._most = _FEW

    def __len__(self) -> int:
        """Waits that are remembered, some of them over."""
        return len(self._waiting)

    def began(self, entry: LiveRequest) -> None:
        """A request begins to wait, at its `waiting_since_s`."""
        if len(self._waiting) >= self._most:
            self._waiting = [item for item in self._waiting if self._waits_since(*item)]
            heapq.heapify(self._waiting)
            self._most = 2 * len(self._waiting) + _FEW
        item = (entry.waiting_since_s, entry.number, entry.request.request_id)
        heapq.heappush(self._waiting, item)

    def overdue(self, now_s: float) -> list[LiveRequest]:
        """Requests whose wait has become too long since the last call, longest wait first."""
        found: list[LiveRequest] = []
        heap = self._waiting
        while heap and heap[0][0] + self.max_wait_s <= now_s:
            entry = self._waits_since(*heapq.heappop(heap))
            if entry is not None:
                found.append(entry)
        return found

    def _waits_since(self, since_s: float, number: int, request_id: str) -> LiveRequest | None:
        """The request, if it has waited ever since and is not pinned."""
        entry = self._find(request_id)
        if entry is None or entry.number != number or entry.request.slot is not None:
            return None
        return entry if entry.waiting_since_s == since_s and not entry.is_pinned else None


class Places:
    """Where each live request stands: by the policy, by its tenant's turn, by how long it waits.

    Args:
        policy: gives places, and says how tenants take turns.
        forecast: what places are reckoned with.
        tenants: what each was served.
        find: the live request with an id, or None.

    Attributes:
        policy: the one that plans go by, until another one is adopted.
        queue: the waiting requests, each in its place.
        max_wait: finds those of them that have waited their longest.
        pinned: ids of live requests that have.
    """

    def __init__(
        self,
        policy: Policy,
        forecast: Forecast,
        tenants: TenantCounters,
        find: Callable[[str], LiveRequest | None],
    ) -> None:
        self.policy = policy
        self._forecast = forecast
        self._tenants = tenants
        self._find = find
        self.queue = WaitingQueue(self.place_of, self._measure, self._has_due, tenants)
        self.max_wait = self._maximum_wait()
        self.pinned: set[str] = set()

    def adopt(self, policy: Policy) -> None:
        """Goes on by another policy: whoever waits is put in its place anew."""
        self.policy = policy
        self.max_wait = self._maximum_wait()
        self.queue.reorder(self._measure, self._has_due)
        for entry in self.queue:
            self._watch(entry)

    @property
    def _measure(self) -> Callable[[LiveRequest], WaitingFigures] | None:
        return None if self.policy.measure is None else self._figures_of

    @property
    def _has_due(self) -> Callable[[Request], bool] | None:
        return None if self.policy.turns is None else self.policy.turns.has_due

    def _maximum_wait(self) -> MaximumWait:
        max_wait_s = self.policy.max_wait_s
        return MaximumWait(math.inf if max_wait_s is None else max_wait_s, self._find)

    @property
    def has_places(self) -> bool:
        """Whether the policy gives requests a place, so that the queue is in its order."""
        return self.policy.place is not None

    def place_of(self, entry: LiveRequest) -> Place:
        """Where an entry stands by the policy; before all others once it was pinned, behind them
        while it is demoted. Where others wait for what it computes, no later than they. What its
        tenant was served is left out."""
        policy = self.policy
        place: Place
        if entry.is_pinned:
            place = (-math.inf, entry.request.arrival_s)
        else:
            place = () if policy.place is None else policy.place(entry.request, self._forecast)
            if entry.is_demoted:
                place = (math.inf, *place)
        if entry.followers:
            return min(place, min(other.place for other in entry.followers.values()))
        return place

    def turn_of(self, entry: LiveRequest) -> tuple[Place, int]:
        """Where a running entry stands among others, its tenant's lead counted."""
        place = self.place_of(entry)
        if place and self.takes_turns:
            lead_s = self.queue.lines.lead(entry.tenant) * self.lead_token_s
            place = (place[0] + lead_s, *place)
        return place, entry.number

    @property
    def takes_turns(self) -> bool:
        """Whether tenants take turns: several have live requests, and the policy minds."""
        return self.policy.turns is not None and self._tenants.num_live > 1

    @property
    def lead_token_s(self) -> float:
        """Seconds by which a request comes later for each token that its tenant is ahead."""
        return 0.0 if self.policy.turns is None else self.policy.turns.token_s(self._forecast)

    def lead(self, entry: LiveRequest) -> float:
        """Tokens by which a live request's tenant is ahead; 0 where no turns are taken."""
        return self.queue.lines.lead(entry.tenant) if self.takes_turns else 0.0

    def _figures_of(self, entry: LiveRequest) -> WaitingFigures:
        assert self.policy.measure is not None
        figures = self.policy.measure(entry.request, entry.place, self._forecast)
        # Who was given up or must come first is not given up again.
        is_settled = entry.is_demoted or entry.is_pinned
        if not is_settled:
            return figures
        demoted_due_s = math.inf if entry.is_pinned else figures.due_s
        return figures._replace(due_s=math.inf, demoted_due_s=demoted_due_s)

    def begin_to_wait(self, entry: LiveRequest) -> None:
        """Puts an entry, which waits since its `waiting_since_s`, in its place."""
        lines = self.queue.lines
        if not lines.has(entry.tenant):
            self._tenants.begin_to_wait(entry.tenant, lines.least_served())
        self.queue.insert(entry)
        if entry.is_pinned:
            self.pinned.add(entry.request.request_id)
        self._watch(entry)

    def _watch(self, entry: LiveRequest) -> None:
        """Remembers a wait that may become too long."""
        if self.max_wait.max_wait_s < math.inf and not entry.is_pinned:
            self.max_wait.began(entry)

    def pin_overdue(self, now_s: float, held: Container[int]) -> None:
        """Sends those to the front of the queue who have waited their longest.

        Args:
            held: numbers of those that wait apart from it. They come to the front when they come
                back.
        """
        for entry in self.max_wait.overdue(now_s):
            if entry.number in held:
                entry.is_pinned = True
            else:
                self.queue.pin(entry)
            self.pinned.add(entry.request.request_id)
