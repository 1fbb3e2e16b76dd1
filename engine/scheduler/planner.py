"""One step, decided from the live table.

It is one long module because a plan is made in one pass, each part of which counts on what the
parts before it have taken.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler.dispatched import Dispatched
from octavo.engine.scheduler.draft import Draft
from octavo.engine.scheduler.live_request import ALWAYS_READY, LiveRequest
from octavo.engine.scheduler.live_table import LiveTable
from octavo.engine.scheduler.ordering import in_order
from octavo.engine.scheduler.policies.policy import (
    Admission,
    Policy,
    admit_everyone,
    no_idle_rows,
)
from octavo.engine.scheduler.preemption import Preemption
from octavo.engine.scheduler.prefill_planner import PrefillPlanner
from octavo.engine.scheduler.refusals import Refusals
from octavo.engine.scheduler.rows import NO_ROWS, Rows
from octavo.engine.scheduler.step_plan import (
    Decision,
    DecodeRows,
    PrefillRow,
    StepLimits,
    StepPlan,
)
from octavo.engine.scheduler.step_size import most_steps
from octavo.engine.scheduler.step_time_model import StepFeatures
from octavo.engine.scheduler.transfers import Transfers

ANY_NUMBER = 1 << 30
"""Of admissions: as many as there is room for."""


class Planner:
    """Makes plans, and moves the host state ahead as if each had run.

    Rows decode first, then prompts advance: running ones, then waiting requests in the policy's
    order; nobody overtakes one that does not fit, unless the policy allows it. Only decode rows
    ever run short of pages once they run; then the policy's victims are preempted. The first in
    the order can evict everyone else and fits alone, so somebody always advances.

    What no plan waits for is left to `tidy`, which must be called before the state is looked at or
    changed again.

    Args:
        table: the state; changed by `plan`.
        limits: budgets that every plan holds to.
        policy: the decisions that are a matter of taste.
        transfers: copies to and from the host.
        draft: collects what the plan says besides its rows.
        refusals: makes the errors of requests that are given up.
        enable_chunked_prefill: split prompts over steps. Without it, only a preempted request that
            has outgrown a step is split.
        watermark_pages: pages that admission leaves free for running rows to grow into.
        max_steps: most decode iterations in one dispatch.
    """

    def __init__(
        self,
        table: LiveTable,
        limits: StepLimits,
        policy: Policy,
        transfers: Transfers,
        draft: Draft,
        refusals: Refusals,
        *,
        enable_chunked_prefill: bool,
        watermark_pages: int,
        max_steps: int,
    ) -> None:
        self._table = table
        self._kv = table.kv
        self._waiting = table.waiting
        self._running = table.running
        self._limits = limits
        self._policy = policy
        self._transfers = transfers
        self._draft = draft
        self._refusals = refusals
        self.preemption = Preemption(table, policy, transfers, draft)
        self._prefill = PrefillPlanner(
            table,
            policy,
            self.preemption,
            transfers,
            draft,
            enable_chunked_prefill=enable_chunked_prefill,
            watermark_pages=watermark_pages,
        )
        self._max_steps = max_steps
        self._ones = np.ones(limits.max_num_seqs, np.int32)
        self._ones.flags.writeable = False
        self._no_rows = DecodeRows.of(())
        self._snapshot = table.snapshot(0.0)  # of each plan, in turn
        self._is_tidy = True
        self._newest: Dispatched | None = None
        self.ended: list[Request] = []
        self.num_rejected = 0
        self.num_plans = 0
        self.num_decode_tokens = 0
        self.num_prefill_tokens = 0

    @property
    def num_computed_tokens(self) -> int:
        """Tokens planned so far, prompts' and outputs'."""
        return self.num_prefill_tokens + self.num_decode_tokens

    def carry_over(self, old: Planner) -> None:
        """Goes on counting where another planner ended."""
        self.ended = old.ended
        self.num_rejected, self.num_plans = old.num_rejected, old.num_plans
        self.num_decode_tokens = old.num_decode_tokens
        self.num_prefill_tokens = old.num_prefill_tokens
        self.preemption.swaps = old.preemption.swaps
        self.preemption.recomputes = old.preemption.recomputes

    def adopt(self, policy: Policy) -> None:
        """Goes on by another policy."""
        self._policy = policy
        self.preemption.adopt(policy)
        self._prefill.adopt(policy)

    def plan(self, now_s: float) -> Dispatched | None:
        """The next step, or None if there is nothing to compute or to copy now."""
        draft = self._draft
        draft.begin()
        self._is_tidy = False
        num_admissions = 0
        if len(self._waiting) or self._running.num_prefilling:
            num_admissions = self._decide_on_waiting(now_s)
        decoding = NO_ROWS
        prefill_rows: list[PrefillRow] = []
        prefilling: list[LiveRequest] = []
        is_short = False
        if not self._policy.prefills_alone:
            decoding, is_short = self._select_decode_rows(now_s)
        if is_short:
            num_admissions = 0
        if num_admissions or self._running.num_prefilling:
            snapshot = self._snapshot
            self._table.renew(snapshot, now_s)
            snapshot.show(decoding)
            num_decode = len(decoding)
            budget = min(self._policy.budget(snapshot), self._limits.max_num_batched_tokens)
            budget -= num_decode
            self._table.forecast.observe_budget(budget, num_decode, decoding.context)
            prefill_rows, prefilling = self._prefill.plan(snapshot, budget, num_admissions)
            if draft.preempted_numbers:
                decoding = self._still_running(decoding)
        if self._policy.prefills_alone and not prefill_rows:
            decoding, is_short = self._select_decode_rows(now_s)
        num_steps = 1
        has_rows = len(decoding) > 0
        if self._max_steps > 1 and has_rows and not prefill_rows and not is_short:
            num_steps = self._choose_num_steps(decoding, now_s)
            if draft.explains and num_steps > 1:
                someone_waits = len(self._waiting) > 0
                text = "while others wait" if someone_waits else "nobody waits"
                draft.explain("", Decision.NUM_STEPS, text, num_tokens=num_steps)
        if self._kv.host.num_pages:
            # Last: an evicted page is as it was only until this plan's rows write to it.
            self._transfers.spill(now_s)
        if not has_rows and not prefill_rows and not draft.has_copies:
            return None
        plan = StepPlan(
            step_id=self.num_plans,
            decode_rows=self._decode_rows(decoding, num_steps),
            prefill_rows=tuple(prefill_rows),
            num_steps=num_steps,
            page_updates=tuple(draft.page_updates),
            preempted=tuple(draft.preempted),
            copy_outs=tuple(draft.copy_outs),
            copy_ins=tuple(draft.copy_ins),
            reasons=tuple(draft.reasons),
        )
        draft.clear()
        self.num_plans += 1
        self._newest = Dispatched(plan, now_s, decoding, prefilling)
        return self._newest

    def tidy(self) -> None:
        """Does what the newest plan left to be done: there is time for it while the device works.

        The host state moves ahead as if the plan had run, who was admitted is entered among the
        rows and pages in their sequences, what they held is forgotten, lengths are guessed anew,
        rows whose last token was planned set apart, and the next plan's rows put together.
        """
        if self._is_tidy:
            return
        self._is_tidy = True
        table, decoding_rows = self._table, self._running.decoding
        self._snapshot.forget_requests()
        newest, self._newest = self._newest, None
        if newest is not None:
            self._move_ahead(newest)
        table.settle()
        table.work.settle()
        table.shares.settle()
        table.waiting.settle()
        self._kv.settle()
        if newest is not None and len(newest.decoding):
            rows, plan = newest.decoding, newest.plan
            if self._policy.measure is not None:
                table.columns.refresh_lengths(
                    rows.requests, rows.slots, rows.starts, table.forecast
                )
            is_ending = rows.starts + plan.decode_rows.max_new_tokens >= rows.ends
            newest.ending.extend(decoding_rows.end(rows, is_ending))
        decoding_rows.prepare(paced=self._policy.measure is not None)

    # Those who wait.

    def _decide_on_waiting(self, now_s: float) -> int:
        """Ends the waiting requests that the policy gives up, sends others behind or back.

        Returns:
            How many others may be admitted.
        """
        self._table.pin_overdue(now_s)
        if self._policy.admit is admit_everyone:
            return ANY_NUMBER
        admission = self._ask_for_admission(now_s)
        for request, reason in admission.rejected:
            entry = self._table.entry(request)
            if self._refusals.probes.takes(request, self.num_computed_tokens):
                if entry.is_demoted:
                    self._table.promote(entry)
                continue
            error = self._refusals.overloaded(self._table, request, reason, now_s)
            self._table.end(entry, RequestStatus.REJECTED, now_s, error=error)
            self.ended.append(request)
            self.num_rejected += 1
            self._draft.explain(request.request_id, Decision.REJECTED, reason)
        for request in admission.demoted:
            if request.status.is_finished or self._refusals.probes.has(request):
                continue  # it was rejected, too, or is served to see
            entry = self._table.entry(request)
            if not entry.is_demoted:
                self._table.demote(entry)
        for request in admission.restored:
            self._table.promote(self._table.entry(request))
        return ANY_NUMBER if admission.limit is None else admission.limit

    def _ask_for_admission(self, now_s: float) -> Admission:
        """What the policy makes of those who wait: nobody is given up on an estimate of his work
        that is not up to date."""
        table = self._table
        while True:
            table.renew(self._snapshot, now_s)
            admission = self._policy.admit(self._snapshot)
            given_up = [request for request, _ in admission.rejected]
            given_up += admission.demoted
            if not given_up or not table.work.num_stale:
                return admission
            waiting = [table.entry(request) for request in given_up if request.slot is None]
            if not sum([table.work.bring_up_to_date(entry) for entry in waiting]):
                return admission

    # Decode rows.

    def _select_decode_rows(self, now_s: float) -> tuple[Rows, bool]:
        """Rows that decode, each with room for one more token; and whether pages ran short."""
        columns, rows = self._table.columns, self._running.decoding
        selected = rows.rows()
        if self._table.num_gated:
            awaits_release = selected.starts > columns.ready_position[selected.slots]
            selected = selected.without(awaits_release.nonzero()[0].tolist())
        if self._policy.idle_rows is not no_idle_rows and len(selected):
            self._table.renew(self._snapshot, now_s)
            self._snapshot.show(selected)
            selected = selected.without(self._policy.idle_rows(self._snapshot))
            columns.last_run_s[selected.slots] = now_s
        full = selected.full(columns)
        if not full.slots:
            return selected, False
        if len(full.slots) <= self._kv.num_available:
            self._grow_by_one(full.slots, full.num_pages)
            return selected, False
        # A row whose last token is on its way is sure to give its pages back at a coming commit.
        # Then rows that find no page sit this step out: cheaper than computing anybody again.
        can_wait = rows.num_ending > 0
        needy = [self._table.entry(selected.requests[index]) for index in full.indices]
        stalled: set[int] = set()
        for entry in in_order(self._table, self._policy, needy, self._table.snapshot(now_s)):
            if entry.request.slot is not None and not self._kv.num_available:
                if can_wait:
                    stalled.add(entry.number)
                    continue
                self.preemption.make_room(entry, now_s)
            if entry.request.slot is not None:
                self._grow(entry, 1)
        return self._still_running(selected, stalled), True

    def _still_running(self, rows: Rows, stalled: Collection[int] = ()) -> Rows:
        """The rows that have not been preempted and do not sit this step out.

        Page updates of rows that will not be in the plan are dropped.
        """
        numbered = zip(rows.requests, rows.numbers.tolist(), strict=True)
        kept = rows.without(
            [
                index
                for index, (request, number) in enumerate(numbered)
                if request.slot is None or number in stalled
            ]
        )
        slots = set(kept.slots.tolist())
        updates = self._draft.page_updates
        self._draft.page_updates = [update for update in updates if update[0] in slots]
        return kept

    def _choose_num_steps(self, decoding: Rows, now_s: float) -> int:
        """Decode iterations that limits and pool allow; adds the pages that all of them write."""
        columns, page_size = self._table.columns, self._limits.page_size
        if self._table.num_gated and self._has_gated_rows:
            return 1  # they come back into step after each token, not after several
        columns.widen()
        starts, limits, capacity = decoding.starts, decoding.ends, columns.capacity[decoding.slots]
        left = limits - starts
        features = StepFeatures(len(starts), 0, decoding.context)
        most = most_steps(self._table.forecast.step_time.predict_s(features))
        num_steps = self._policy.num_steps(
            self._table.snapshot(now_s),
            min(self._max_steps, most),
            int(np.max(left)),
            int(np.min(left)),
        )
        while num_steps > 1:
            ends = np.minimum(starts + num_steps, limits)
            num_missing = np.maximum(ends - capacity + page_size - 1, 0) // page_size
            if int(num_missing.sum()) <= self._kv.num_available:
                if int(num_missing.max()) <= 1:
                    lacking = num_missing > 0
                    self._grow_by_one(
                        decoding.slots[lacking].tolist(), (capacity[lacking] // page_size).tolist()
                    )
                    return num_steps
                self._table.settle()
                for index in num_missing.nonzero()[0].tolist():
                    self._grow(self._table.entry(decoding.requests[index]), num_steps)
                return num_steps
            num_steps //= 2
        return 1

    @property
    def _has_gated_rows(self) -> bool:
        return any(entry.ready_position != ALWAYS_READY for entry in self._running.decoding)

    def _grow(self, entry: LiveRequest, num_steps: int) -> None:
        """Adds the pages that the entry lacks for `num_steps` iterations, and notes them."""
        request, index = entry.request, len(entry.pages.page_ids)
        assert request.slot is not None
        end = min(request.num_computed_tokens + num_steps, entry.last_position)
        new = self._kv.grow(entry.pages, end)
        for page in new:
            self._draft.page_updates.append((request.slot, index, page))
            index += 1
        self._table.columns.capacity[request.slot] += len(new) * self._limits.page_size

    def _grow_by_one(self, slots: list[int], num_pages: list[int]) -> None:
        """Adds a page to each row, and notes it: as `_grow`, for all that have no room left.

        Args:
            slots: theirs.
            num_pages: pages that each has.
        """
        if self._limits.run_pages == 1:  # any page will do, which takes less time to find
            pages = self._kv.take(len(slots))
        else:
            page_ids = self._table.columns.page_ids
            pages = self._kv.take_after([page_ids[slot][-1] for slot in slots])
        self._draft.page_updates.extend(self._table.columns.grow(slots, num_pages, pages))

    def _decode_rows(self, decoding: Rows, num_steps: int) -> DecodeRows:
        """The rows by column."""
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

    def _move_ahead(self, dispatched: Dispatched) -> None:
        """Moves decode rows ahead by what they may emit, and the device's end of work."""
        plan, decoding, table = dispatched.plan, dispatched.decoding, self._table
        dispatched.count()
        self.num_prefill_tokens += int(dispatched.features.num_prefill)
        iteration_s = table.forecast.step_time.predict_s(dispatched.features)
        plan.priced_s = iteration_s * plan.num_steps
        begins_s = max(table.busy_until_s, dispatched.now_s)
        table.busy_until_s = begins_s + plan.priced_s
        if not len(decoding):
            return
        columns, slots = table.columns, decoding.slots
        if plan.num_steps == 1:
            self.num_decode_tokens += len(decoding)
            counts = columns.counts
            counts += decoding.is_row  # each of the three grows by one
        else:
            max_new_tokens = plan.decode_rows.max_new_tokens
            self.num_decode_tokens += int(max_new_tokens.sum())
            columns.num_computed[slots] = decoding.starts + max_new_tokens
            columns.num_inflight_tokens[slots] += max_new_tokens
            columns.num_inflight_steps[slots] += 1
