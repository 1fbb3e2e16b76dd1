"""Waiting requests in a line for each tenant, and whose turn is next."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.tenants import TenantCounters
from octavo.engine.scheduler.waiting_columns import Floats

_FIRST_SIZE = 16


class Kind(IntEnum):
    """What a waiting request's claim rests on.

    PINNED: it has waited its longest and comes before all others, by its place.
    DUE: it has a due time, to which its tenant's lead is added.
    OPEN: nothing was promised: its tenant's lead alone decides between tenants.
    DEMOTED: it comes after all others; between tenants the lead decides.
    """

    PINNED = 0
    DUE = 1
    OPEN = 2
    DEMOTED = 3


class _Name(NamedTuple):
    tenant: int
    priority: int
    kind: Kind


class Line:
    """Waiting requests of one tenant, class and kind, in the order of their places.

    Attributes:
        name: tenant, class and kind.
        index: of the line's column in the table of heads.
        entries: the requests.
    """

    __slots__ = ("entries", "index", "name")

    def __init__(self, name: _Name, index: int) -> None:
        self.name = name
        self.index = index
        self.entries: list[LiveRequest] = []


_Turn = tuple[tuple[float, ...], int]
"""Where a request stands: its claim, its own place behind that, and its number."""


class TenantLines:
    """A line for each tenant, class and kind of claim. Places hold still; tenants' counters need
    not: a turn is decided from the heads of the lines, by the counters of that moment.

    Requests without a due time share one claim, that of the earliest place among them, and the
    least served tenant takes it. So a tenant's own backlog, which makes its oldest request early,
    wins it nothing over a tenant that has just come.

    Args:
        tenants: what each was served.
    """

    def __init__(self, tenants: TenantCounters) -> None:
        self._tenants = tenants
        self._lines: list[Line] = []
        self._by_name: dict[_Name, Line] = {}
        self._num_waiting: dict[int, int] = {}
        self._num_open = 0
        # By line: first component of its head's place, tenant, class, whether it is open.
        self._head_s: Floats = np.zeros(_FIRST_SIZE)
        self._tenant = np.zeros(_FIRST_SIZE, np.intp)
        self._priority = np.zeros(_FIRST_SIZE, np.int64)
        self._is_open = np.zeros(_FIRST_SIZE, np.bool_)

    def has(self, tenant: int) -> bool:
        """Whether a request of the tenant waits."""
        return tenant in self._num_waiting

    def least_served(self) -> float | None:
        """The least counter of a tenant of which a request waits; None if none does."""
        if not self._lines:
            return None
        return float(self._tenants.served[self._tenant[: len(self._lines)]].min(0))

    def lead(self, tenant: int) -> float:
        """Tokens by which a tenant is ahead of the least served one that waits: its counter where
        none waits, and below 0 for one that was served less and does not wait."""
        return self._tenants.served.item(tenant) - (self.least_served() or 0.0)

    def insert(self, entry: LiveRequest, kind: Kind) -> None:
        """Puts an entry, whose place is known, in its line."""
        name = _Name(entry.tenant, int(entry.request.priority), kind)
        line = self._by_name.get(name)
        if line is None:
            line = self._open(name)
        entries, key = line.entries, _key(entry)
        is_last = not entries or _key(entries[-1]) < key
        index = len(entries) if is_last else bisect_left(entries, key, key=_key)
        entries.insert(index, entry)
        if not index:
            self._head_s[line.index] = _first(entry)
        entry.line = line
        self._num_waiting[entry.tenant] = self._num_waiting.get(entry.tenant, 0) + 1

    def remove(self, entry: LiveRequest) -> None:
        """Takes an entry out; it must be in a line."""
        line = entry.line
        assert line is not None, entry.request.request_id
        entry.line = None
        entries = line.entries
        if entries[0] is entry:
            del entries[0]
            if entries:
                self._head_s[line.index] = _first(entries[0])
            else:
                self._close(line)
        else:
            del entries[bisect_left(entries, _key(entry), key=_key)]
        left = self._num_waiting[entry.tenant] - 1
        if left:
            self._num_waiting[entry.tenant] = left
            return
        del self._num_waiting[entry.tenant]
        if not self._num_waiting:
            self._tenants.waits_last(entry.request.tenant)

    def clear(self) -> None:
        """Takes every entry out."""
        for line in self._lines:
            for entry in line.entries:
                entry.line = None
        self._lines.clear()
        self._by_name.clear()
        self._num_waiting.clear()
        self._num_open = 0

    def in_turn(
        self, token_s: float, priority: int | None = None
    ) -> Iterator[tuple[_Turn, LiveRequest]]:
        """Entries, next to be served first, with where they stand. Each is taken out, or is to be
        passed over, before the next one is asked for; the counters may have moved on by then.

        Args:
            token_s: seconds that a token of lead is worth.
            priority: the only class to look at; None for all.
        """
        passed: dict[Line, int] = {}
        while True:
            found = self._next(token_s, priority, passed)
            if found is None:
                return
            line, turn, entry = found
            yield turn, entry
            if entry.line is line:
                passed[line] = passed.get(line, 0) + 1

    def _next(
        self, token_s: float, priority: int | None, passed: dict[Line, int]
    ) -> tuple[Line, _Turn, LiveRequest] | None:
        """The line whose turn it is, and its first entry that was not passed over."""
        size = len(self._lines)
        if not size:
            return None
        claim_s, is_open = self._head_s[:size], self._is_open[:size]
        served = self._tenants.served[self._tenant[:size]]
        lead_s = (served - served.min(0)) * token_s
        if passed or priority is not None:
            claim_s = self._leave_out(claim_s.copy(), lead_s, priority, passed)
        if self._num_open:
            claim_s = np.where(is_open, claim_s[is_open].min(0), claim_s)
        claim_s = claim_s + lead_s
        least_s = float(claim_s.min(0))
        if least_s == math.inf:  # all that are left are demoted
            least_lead_s = float(lead_s[claim_s == math.inf].min(0))
            if least_lead_s == math.inf:
                return None
            equals = (lead_s == least_lead_s).nonzero()[0].tolist()
        else:
            equals = (claim_s == least_s).nonzero()[0].tolist()
        found = [
            (((least_s, *entry.place), entry.number), line, entry)
            for line in [self._lines[index] for index in equals]
            for entry in (line.entries[passed.get(line, 0)],)
        ]
        turn, line, entry = min(found, key=_turn_of) if len(found) > 1 else found[0]
        return line, turn, entry

    def _leave_out(
        self, claim_s: Floats, lead_s: Floats, priority: int | None, passed: dict[Line, int]
    ) -> Floats:
        """Claims without entries that were passed over, or of other classes: a line of which none
        is left has an infinite claim and an infinite lead."""
        for line, count in passed.items():
            if not line.entries:
                continue  # the line is no more
            if count < len(line.entries):
                claim_s[line.index] = _first(line.entries[count])
            else:
                claim_s[line.index] = lead_s[line.index] = math.inf
        if priority is not None:
            is_other = self._priority[: len(claim_s)] != priority
            claim_s[is_other] = lead_s[is_other] = math.inf
        return claim_s

    def _open(self, name: _Name) -> Line:
        """A line that has no entry yet."""
        index = len(self._lines)
        if index == len(self._head_s):
            self._head_s = np.concatenate((self._head_s, np.zeros(index)))
            self._tenant = np.concatenate((self._tenant, np.zeros(index, np.intp)))
            self._priority = np.concatenate((self._priority, np.zeros(index, np.int64)))
            self._is_open = np.concatenate((self._is_open, np.zeros(index, np.bool_)))
        line = self._by_name[name] = Line(name, index)
        self._lines.append(line)
        self._write(line)
        self._num_open += name.kind is Kind.OPEN
        return line

    def _close(self, line: Line) -> None:
        """Forgets a line that has no entry any more; the last line takes its column."""
        del self._by_name[line.name]
        self._num_open -= line.name.kind is Kind.OPEN
        last = self._lines.pop()
        if last is not line:
            self._head_s[line.index] = self._head_s[last.index]
            self._lines[line.index] = last
            last.index = line.index
            self._write(last)

    def _write(self, line: Line) -> None:
        """Enters a line's name in its column."""
        index, name = line.index, line.name
        self._tenant[index] = name.tenant
        self._priority[index] = name.priority
        self._is_open[index] = name.kind is Kind.OPEN

    def check_integrity(self, entries: Sequence[LiveRequest]) -> None:
        """Asserts that the lines hold these entries, each where it belongs."""
        assert sum(len(line.entries) for line in self._lines) == len(entries)
        assert self._num_open == sum(line.name.kind is Kind.OPEN for line in self._lines)
        for index, line in enumerate(self._lines):
            assert line.index == index
            assert self._by_name[line.name] is line
            assert [self._tenant.item(index), self._priority.item(index)] == list(line.name[:2])
            assert self._head_s.item(index) == _first(line.entries[0])
            keys = [_key(entry) for entry in line.entries]
            assert keys == sorted(set(keys))
        for entry in entries:
            assert entry.line is not None
            assert entry in entry.line.entries
            assert entry.line.name[:2] == (entry.tenant, entry.request.priority)


def _key(entry: LiveRequest) -> tuple[tuple[float, ...], int]:
    return entry.place, entry.number


def _turn_of(found: tuple[_Turn, Line, LiveRequest]) -> _Turn:
    return found[0]


def _first(entry: LiveRequest) -> float:
    """The first component of an entry's place; equal for all where the policy gives none."""
    return entry.place[0] if entry.place else 0.0
