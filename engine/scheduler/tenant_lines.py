"""Waiting requests in a line for each tenant, and whose turn is next."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from octavo.engine.scheduler.fairness import TenantCounters
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.waiting_columns import Floats

_FIRST_SIZE = 16

_key = attrgetter("place", "number")


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


Turn = tuple[tuple[tuple[float, ...], int], LiveRequest]
"""A request, and before it where that stands: its claim, its own place behind that, its number."""


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
        self._line_of: dict[int, Line] = {}  # by the number of a request that waits
        self._num_waiting: dict[int, int] = {}
        self._num_open = 0
        self._num_changes = 0
        self._gone: list[tuple[Line, LiveRequest]] = []
        # By line: first component of its head's place, tenant, class, whether it is open.
        self._head_s: Floats = np.zeros(_FIRST_SIZE)
        self._tenant = np.zeros(_FIRST_SIZE, np.intp)
        self._priority = np.zeros(_FIRST_SIZE, np.int64)
        self._is_open = np.zeros(_FIRST_SIZE, np.bool_)

    def has(self, tenant: int) -> bool:
        """Whether a request of the tenant waits."""
        self.flush()
        return tenant in self._num_waiting

    def least_served(self) -> float | None:
        """The least counter of a tenant of which a request waits; None if none does."""
        self.flush()
        if not self._lines:
            return None
        return float(self._tenants.served[self._tenant[: len(self._lines)]].min(0))

    def lead(self, tenant: int) -> float:
        """Tokens by which a tenant is ahead of the least served one that waits: its counter where
        none waits, and below 0 for one that was served less and does not wait."""
        return self._tenants.served.item(tenant) - (self.least_served() or 0.0)

    def insert(self, entry: LiveRequest, kind: Kind) -> None:
        """Puts an entry, whose place is known, in its line."""
        self.flush()
        self._num_changes += 1
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
        self._line_of[entry.number] = line
        self._num_waiting[entry.tenant] = self._num_waiting.get(entry.tenant, 0) + 1

    def remove(self, entry: LiveRequest) -> None:
        """Takes an entry out; it must be in a line."""
        self._gone.append((self._line_of.pop(entry.number), entry))

    def clear(self) -> None:
        """Takes every entry out."""
        self.flush()
        self._line_of.clear()
        self._lines.clear()
        self._by_name.clear()
        self._num_waiting.clear()
        self._num_open = 0
        self._num_changes += 1

    def in_turn(self, token_s: float, priority: int | None = None) -> Iterator[Turn]:
        """Entries, next to be served first, with where they stand. Each is taken out, or is to be
        passed over, before the next one is asked for; the counters may have moved on by then.

        Args:
            token_s: seconds that a token of lead is worth.
            priority: the only class to look at; None for all.
        """
        passed: set[int] = set()
        while True:
            self.flush()
            num_changes, num_yielded = self._num_changes, 0
            for turn in self._rank(token_s, priority, passed):
                num_yielded += 1
                yield turn
                if turn[1].number in self._line_of:
                    passed.add(turn[1].number)
                if self._num_changes != num_changes:
                    break  # lines have changed
            if not num_yielded:
                return

    def _rank(self, token_s: float, priority: int | None, passed: Container[int]) -> Iterator[Turn]:
        """Entries by turn, until the first of the open ones is taken: then others share its claim.

        All lines are ranked at once. Whoever leaves a line makes only its tenant come later: what
        a rank says of such a line is looked at again when the line is reached.
        """
        lines, size, served = self._lines, len(self._lines), self._tenants.served
        line_of = self._line_of
        if not size:
            return
        tenants, head_s, is_open = self._tenant[:size], self._head_s[:size], self._is_open[:size]
        least = float(served[tenants].min(0))
        chosen = range(size)
        if priority is not None:
            chosen = (self._priority[:size] == priority).nonzero()[0].tolist()
            head_s, is_open, tenants = head_s[chosen], is_open[chosen], tenants[chosen]
            if not chosen:
                return
        open_s = math.inf
        if self._num_open:
            open_s = (
                self._first_open_s(chosen, passed)
                if passed
                else float(np.where(is_open, head_s, math.inf).min(0))
            )
            head_s = np.where(is_open, open_s, head_s)
        claims_s = head_s + (served[tenants] - least) * token_s
        order = claims_s.argsort(kind="stable").tolist()
        claims = claims_s.tolist()
        reached: list[tuple[bool, float, tuple[float, ...], int, LiveRequest, int]] = []

        def reach(line: Line, index: int) -> None:
            """Ranks the first entry of a line, from an index on, that was not passed over."""
            entries = line.entries
            while index < len(entries) and (
                entries[index].number in passed or entries[index].number not in line_of
            ):
                index += 1
            if index < len(entries):
                entry = entries[index]
                is_demoted, claim_s = self._claim(entry, line.name.kind, open_s, least, token_s)
                item = (is_demoted, claim_s, entry.place, entry.number, entry, index)
                heapq.heappush(reached, item)

        at, num_chosen = 0, len(order)
        while True:
            while at < num_chosen:
                claim_s = claims[order[at]]
                if reached and claim_s > (math.inf if reached[0][0] else reached[0][1]):
                    break  # demoted ones have an infinite claim here, and are reached together
                reach(lines[chosen[order[at]]], 0)
                at += 1
            if not reached:
                return
            is_demoted, claim_s, place, number, entry, index = heapq.heappop(reached)
            line = line_of[number]
            if self._claim(entry, line.name.kind, open_s, least, token_s)[1] > claim_s:
                reach(line, index)  # its tenant has been served since
                continue
            # Beside running prompts a demoted one stands by its own place, which is infinite, too.
            yield ((math.inf if is_demoted else claim_s, *place), number), entry
            if line.name.kind is Kind.OPEN and place[0] <= open_s:
                return
            reach(line, index + 1)

    def _first_open_s(self, chosen: Iterable[int], passed: Container[int]) -> float:
        """The earliest place of an open entry that was not passed over; infinity if none is."""
        return min(
            (
                _first(entry)
                for line in [self._lines[index] for index in chosen]
                if line.name.kind is Kind.OPEN
                for entry in itertools.islice(
                    (entry for entry in line.entries if entry.number not in passed), 1
                )
            ),
            default=math.inf,
        )

    def _claim(
        self, entry: LiveRequest, kind: Kind, open_s: float, least: float, token_s: float
    ) -> tuple[bool, float]:
        """Where an entry at the head of its line stands; smaller comes first."""
        lead_s = (self._tenants.served.item(entry.tenant) - least) * token_s
        if kind is Kind.DEMOTED:
            return True, lead_s
        return False, lead_s + (open_s if kind is Kind.OPEN else _first(entry))

    def flush(self) -> None:
        """Takes entries that have left out of their lines, which no plan need wait for."""
        self._num_changes += len(self._gone) > 0
        for line, entry in self._gone:
            entries = line.entries
            if entries[0] is entry:
                del entries[0]
                if entries:
                    self._head_s[line.index] = _first(entries[0])
                else:
                    self._close(line)
            else:
                del entries[bisect_left(entries, _key(entry), key=_key)]
            left = self._num_waiting[line.name.tenant] - 1
            if left:
                self._num_waiting[line.name.tenant] = left
            else:
                del self._num_waiting[line.name.tenant]
                if not self._num_waiting:
                    self._tenants.waits_last(entry.request.tenant)
        self._gone.clear()

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
        self.flush()
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
            line = self._line_of[entry.number]
            assert entry in line.entries
            assert line.name[:2] == (entry.tenant, entry.request.priority)
        assert len(self._line_of) == len(entries)


def _first(entry: LiveRequest) -> float:
    """The first component of an entry's place; equal for all where the policy gives none."""
    return entry.place[0] if entry.place else 0.0
