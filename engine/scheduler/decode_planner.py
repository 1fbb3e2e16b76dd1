"""The decode rows of a step: which rows decode, the pages that they grow into, and for how long."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from octavo.engine.scheduler.live_request import ALWAYS_READY, LiveRequest
from octavo.engine.scheduler.pending_updates import PendingUpdates
from octavo.engine.scheduler.plan_builder import PlanBuilder
from octavo.engine.scheduler.policy import Snapshot, no_idle_rows
from octavo.engine.scheduler.preemption import Preemption
from octavo.engine.scheduler.request_order import RequestOrder
from octavo.engine.scheduler.request_table import RequestTable
from octavo.engine.scheduler.rows import Rows
from octavo.engine.scheduler.step_plan import Decision, DecodeRows
from octavo.engine.scheduler.step_time_model import StepFeatures

MOST_DISPATCH_S = 0.05
"""Longest that a dispatch of several decode iterations may take. Its tokens reach their readers
together, and a request that arrives meanwhile waits for all of it; what it saves, the host's time
for a dispatch, is little of so long a step."""


def most_steps(iteration_s: float) -> int:
    """Most decode iterations of `iteration_s` seconds each in one dispatch, at least 1."""
    return max(1, int(MOST_DISPATCH_S / iteration_s))


class DecodePlanner:
    """Chooses the rows that decode, and finds the pages that they need.

    Rows that decode are the only ones that run short of pages once they run. Then the policy's
    victims are preempted. The first in the order can evict everyone else and fits alone, so
    somebody always advances.

    Args:
        table: the state; rows are given pages.
        pending: who was admitted in this plan, and the like.
        preemption: carries out the choice of victims.
        builder: the plan under construction, which names the pages that rows gained.
        order: in which order rows are given pages.
        max_steps: most decode iterations in one dispatch.
    """

    def __init__(
        self,
        table: RequestTable,
        pending: PendingUpdates,
        preemption: Preemption,
        builder: PlanBuilder,
        order: RequestOrder,
        *,
        max_steps: int,
    ) -> None:
        self._table = table
        self._kv = table.kv
        self._num_groups = table.kv.needs.num_groups
        self._limits = table.limits
        self._pending = pending
        self._preemption = preemption
        self._builder = builder
        self._order = order
        self._max_steps = max_steps
        self._ones = np.ones(table.limits.max_num_seqs, np.int32)
        self._ones.flags.writeable = False
        self._no_rows = DecodeRows.of(())

    def give_pages(self, snapshot: Snapshot) -> bool:
        """Gives rows that have known tokens to compute again the pages for them; whether pages ran
        short. Such a row is no row that decodes, and a prompt once it has them."""
        table, kv, rows = self._table, self._kv, self._table.rows
        table.renew(snapshot)
        is_short = False
        for entry in self._order.of(rows.lacking_pages, snapshot):
            slot, pages, end = entry.request.slot, entry.pages, entry.prefill_end
            if slot is None:
                continue  # preempted for one before it
            num_lacking = max(0, kv.needs.num_positions(end) - len(pages.page_ids))
            num_pages = num_lacking * self._num_groups
            is_short |= num_pages > kv.num_available
            if not self._find_pages(entry, num_pages, snapshot.now_s):
                continue
            if num_lacking:
                kv.grow(pages, end)
                rows.pages.has_grown(slot, num_lacking)
            rows.begin_prefill(entry)
        return is_short

    def _find_pages(self, entry: LiveRequest, num_pages: int, now_s: float) -> bool:
        """Whether there are pages for a running request, if need be those of others."""
        if num_pages <= self._kv.num_available:
            return True
        if self._table.rows.num_ending > 0:
            return False  # some come back at a coming commit, as in `_make_room`
        self._preemption.make_room(entry, now_s, num_pages)
        return entry.request.slot is not None

    def select(self, snapshot: Snapshot) -> tuple[Rows, bool]:
        """Rows that decode, each with room for one more token; and whether pages ran short."""
        table, policy = self._table, self._table.places.policy
        rows = table.rows
        selected = rows.decode_rows()
        if table.live.num_with_grammar:
            is_blocked = selected.starts > rows.ready_position[selected.slots]
            selected = selected.without(is_blocked.nonzero()[0].tolist())
        if policy.idle_rows is not no_idle_rows and len(selected):
            table.renew(snapshot)
            snapshot.decoding = selected
            selected = selected.without(policy.idle_rows(snapshot))
            rows.last_run_s[selected.slots] = snapshot.now_s
        full = rows.full(selected)
        if not full.slots:
            return selected, False
        if len(full.slots) * self._num_groups <= self._kv.num_available:
            self._grow_by_one(full.slots, full.num_pages)
            return selected, False
        return self._make_room(selected, full.indices, snapshot), True

    def _make_room(self, rows: Rows, indices: list[int], snapshot: Snapshot) -> Rows:
        """The rows, less those that are preempted or sit this step out, as pages are short.

        Args:
            indices: of the rows that need a page.
        """
        table = self._table
        # A row whose last token is on its way is sure to give its pages back at a coming commit.
        # Then rows that find no page sit this step out: cheaper than computing anybody again.
        can_wait = table.rows.num_ending > 0
        needy = [table.live.entry(rows.requests[index]) for index in indices]
        stalled: set[int] = set()
        table.renew(snapshot)
        for entry in self._order.of(needy, snapshot):
            if entry.request.slot is not None and self._kv.num_available < self._num_groups:
                if can_wait:
                    stalled.add(entry.number)
                    continue
                self._preemption.make_room(entry, snapshot.now_s, self._num_groups)
            if entry.request.slot is not None:
                self._grow(entry, 1)
        return self.still_running(rows, stalled)

    def still_running(self, rows: Rows, stalled: Collection[int] = ()) -> Rows:
        """The rows that have not been preempted and do not sit this step out.

        Page updates of rows that will not be in the plan are dropped.
        """
        numbered = zip(rows.requests, rows.numbers.tolist(), strict=True)
        left_out = [
            index
            for index, (request, number) in enumerate(numbered)
            if request.slot is None or number in stalled
        ]
        slots = set(rows.slots[left_out].tolist())
        updates = self._builder.page_updates
        self._builder.page_updates = [update for update in updates if update[0] not in slots]
        return rows.without(left_out)

    def choose_num_steps(self, decoding: Rows, snapshot: Snapshot) -> int:
        """Decode iterations that limits and pool allow; adds the pages that all of them write."""
        if self._max_steps == 1:
            return 1
        if self._table.live.num_with_grammar and self._has_rows_with_grammar:
            return 1  # they come back into step after each token, not after several
        left = decoding.ends - decoding.starts
        self._table.renew(snapshot)
        features = StepFeatures(len(decoding), 0, decoding.context)
        most = most_steps(snapshot.forecast.step_time.predict_s(features))
        num_steps = self._table.places.policy.num_steps(
            snapshot, min(self._max_steps, most), int(np.max(left)), int(np.min(left))
        )
        while num_steps > 1 and not self._grow_by(decoding, num_steps):
            num_steps //= 2
        if num_steps > 1 and self._builder.explains:
            text = "while others wait" if len(self._table.waiting) else "nobody waits"
            self._builder.explain("", Decision.NUM_STEPS, text, num_tokens=num_steps)
        return num_steps

    def _grow_by(self, decoding: Rows, num_steps: int) -> bool:
        """Adds the pages that all rows write in so many iterations, if the pool has them."""
        pages, slots = self._table.rows.pages, decoding.slots
        ends = np.minimum(decoding.starts + num_steps, decoding.ends)
        num_missing = pages.num_missing(slots, ends)
        if int(num_missing.sum()) * self._num_groups > self._kv.num_available:
            return False
        if int(num_missing.max(0)) <= 1:
            lacking = slots[num_missing > 0]
            self._grow_by_one(lacking.tolist(), pages.num_pages(lacking))
            return True
        self._pending.flush()
        for index in num_missing.nonzero()[0].tolist():
            self._grow(self._table.live.entry(decoding.requests[index]), num_steps)
        return True

    @property
    def _has_rows_with_grammar(self) -> bool:
        return any(entry.ready_position != ALWAYS_READY for entry in self._table.rows.decoding)

    def _grow(self, entry: LiveRequest, num_steps: int) -> None:
        """Adds the pages that the entry lacks for `num_steps` iterations, and notes them."""
        request, first = entry.request, len(entry.pages.page_ids)
        assert request.slot is not None
        end = min(request.num_computed_tokens + num_steps, entry.last_position)
        self._kv.grow(entry.pages, end)
        for index in range(first, len(entry.pages.page_ids)):
            self._builder.add_pages(request.slot, index, entry.pages)
        self._table.rows.pages.has_grown(request.slot, len(entry.pages.page_ids) - first)

    def _grow_by_one(self, slots: list[int], num_pages: list[int]) -> None:
        """Adds a page of each cache group to each row, and notes it: as `_grow`, for all that have
        no room left.

        Args:
            slots: theirs.
            num_pages: pages that each has.
        """
        row_pages = self._table.rows.pages
        if self._limits.run_pages == 1:  # any page will do, which takes less time to find
            new = self._kv.allocator.take(len(slots) * self._num_groups)
        else:
            new = self._kv.allocator.take_after(row_pages.last_pages(slots))
        self._builder.page_updates.extend(row_pages.grow(slots, num_pages, new))

    def by_column(self, decoding: Rows, num_steps: int) -> DecodeRows:
        """The rows as a plan holds them."""
        num_rows = len(decoding)
        if not num_rows:
            return self._no_rows
        if num_steps == 1:
            max_new_tokens = self._ones[:num_rows]
        else:
            max_new_tokens = np.minimum(decoding.ends - decoding.starts, num_steps)
        return DecodeRows(
            requests=decoding.requests,
            slots=decoding.slots,
            starts=decoding.starts,
            max_new_tokens=max_new_tokens,
        )
