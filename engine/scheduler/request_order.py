"""In which order requests are served: rows, running prompts, and waiting requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from octavo.engine.request import Priority
from octavo.engine.scheduler.fairness import short_of_pages
from octavo.engine.scheduler.live_request import LiveRequest, Place
from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.request_table import RequestTable


class RequestOrder:
    """The policy's order, and what comes before it.

    Args:
        table: the state; read only.

    Attributes:
        may_admit: whether waiting requests come at all. Whoever asks for candidates may change it
            between two of them.
        below_quota: classes below their quota whose first request has come first.
    """

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._places = table.places
        self._waiting = table.waiting
        self.may_admit = False
        self.below_quota: set[int] = set()

    def of(self, entries: Sequence[LiveRequest], snapshot: Snapshot) -> Sequence[LiveRequest]:
        """`entries`, first to be served first; equals in order of acceptance."""
        live, places = self._table.live, self._places
        if len(entries) < 2:
            return entries
        if places.has_places:
            return sorted(entries, key=places.turn_of)
        accepted = sorted(entries, key=lambda entry: entry.number)
        ordered = places.policy.order(snapshot, [entry.request for entry in accepted])
        return [live.entry(request) for request in ordered]

    def candidates(self, snapshot: Snapshot) -> Iterator[LiveRequest]:
        """Running prompts and waiting requests, first to be served first: rows that decoded and
        compute forced tokens, then the first of each class below its quota, then all by the policy
        and the tenants' turns.

        Each is admitted or skipped before the next one is asked for, and nobody who waits comes
        any more once admission is over.
        """
        policy, queue = self._places.policy, self._waiting
        prefilling: Sequence[LiveRequest] = ()
        if self._table.rows.num_prefilling:
            prefilling = self.of(self._table.rows.prefilling, snapshot)
            going_on = [entry for entry in prefilling if entry.goes_on]
            if going_on:
                yield from going_on
                prefilling = [entry for entry in prefilling if not entry.goes_on]
        entries = queue.entries
        if not self.may_admit or not entries:
            yield from prefilling
            return
        if not self._places.has_places:
            yield from prefilling
            waiting = [self._table.live.entry(request) for request in queue.requests]
            for entry in self.of(waiting, snapshot):
                if self.may_admit:
                    yield entry
            return
        if len(queue.columns) and not queue.head.is_pinned:
            # Nobody is, as long as somebody has waited his longest: the pinned come first.
            below = self._table.quotas.below_quota(queue.columns.classes)
            lacking = self._short_of_pages(snapshot)
            if below or lacking:
                yield from self._first_below_quota(below, lacking)
        turns = self._in_turn()
        turn = next(turns, None) if policy.merges_prompts or not prefilling else None
        for entry in prefilling:
            if policy.merges_prompts:
                key = self._places.turn_of(entry)
                while self.may_admit and turn is not None and turn[0] < key:
                    yield turn[1]
                    turn = next(turns, None)
            yield entry
        if turn is None:
            turn = next(turns, None)
        while self.may_admit and turn is not None:
            yield turn[1]
            turn = next(turns, None)

    def _in_turn(self) -> Iterator[tuple[tuple[Place, int], LiveRequest]]:
        """Waiting requests, next to be served first, each with where it stands. Each is admitted or
        skipped before the next one is asked for."""
        queue, places = self._waiting, self._places
        if places.takes_turns:
            yield from queue.lines.in_turn(places.lead_token_s)
            return
        entries, index = queue.entries, 0
        while index < len(entries):
            entry = entries[index]
            yield (entry.place, entry.number), entry
            index += entry.request.slot is None

    def _first_below_quota(self, below: list[int], lacking: list[int]) -> Iterator[LiveRequest]:
        """The first of each class that is below its quota, the furthest below first.

        Args:
            below: classes that wait and were served less than their quota.
            lacking: classes that hold less than their quota of the pages.
        """
        queue = self._waiting
        for priority in dict.fromkeys((*below, *lacking)):
            if not self.may_admit or not queue.columns.num_of(priority):
                continue  # those before may have been the last who waited
            entry = self._first_of(priority)
            # Pages are short for it if they would not be enough for two of its size to grow.
            num_pages = 2 * self._table.kv.needs.held(entry.request.num_tokens)
            is_short = priority in lacking and self._table.kv.num_available < num_pages + (
                len(self._table.rows) * self._table.kv.needs.num_groups
            )
            if entry.is_demoted or not (is_short or priority in below):
                continue
            self.below_quota.add(priority)
            yield entry

    def _short_of_pages(self, snapshot: Snapshot) -> list[int]:
        """Classes that hold less than their quota of the pages, the furthest below first; none as
        long as there are pages for whoever waits."""
        num_pages, needs = self._table.limits.num_pages - 1, self._table.limits.needs
        if snapshot.num_available_pages * 4 >= num_pages:
            return []
        held = np.bincount(
            snapshot.rows.priority[snapshot.decoding.slots],
            needs.held_each(snapshot.decoding.starts.astype(np.float64) + 1.0),
            len(Priority),
        )
        for request in (*snapshot.prefilling, *snapshot.demoted):
            held[request.priority] += needs.held(request.num_tokens)
        return short_of_pages(held.tolist(), num_pages)

    def _first_of(self, priority: int) -> LiveRequest:
        """The waiting request of a class, of which there is one, whose turn it is."""
        queue, places = self._waiting, self._places
        if places.takes_turns:
            return next(queue.lines.in_turn(places.lead_token_s, priority))[1]
        return queue[int((queue.columns.priority == priority).argmax())]
