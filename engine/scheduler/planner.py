"""One step, decided from the live table."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.engine.errors import OverloadedError
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler.draft import Draft
from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.live_table import Columns, LiveTable, columns_of
from octavo.engine.scheduler.ordering import in_order
from octavo.engine.scheduler.policies.policy import Policy
from octavo.engine.scheduler.preemption import Preemption
from octavo.engine.scheduler.prefill_planner import PrefillPlanner
from octavo.engine.scheduler.step_plan import (
    Decision,
    DecodeRows,
    PrefillRow,
    StepLimits,
    StepPlan,
)
from octavo.engine.scheduler.step_time_model import StepFeatures
from octavo.engine.scheduler.transfers import Transfers


class Dispatched(NamedTuple):
    """A plan, the records of its rows' requests (decode rows first), and what it should cost."""

    plan: StepPlan
    entries: tuple[LiveRequest, ...]
    features: StepFeatures


class Planner:
    """Makes plans, and moves the host state ahead as if each had run.

    Rows decode first, then prompts advance: running ones, then waiting requests in the policy's
    order; nobody overtakes one that does not fit, unless the policy allows it. Only decode rows
    ever run short of pages once they run; then the policy's victims are preempted. The first in
    the order can evict everyone else and fits alone, so somebody always advances.

    Args:
        table: the state; changed by `plan`.
        limits: budgets that every plan holds to.
        policy: the decisions that are a matter of taste.
        transfers: copies to and from the host.
        draft: collects what the plan says besides its rows.
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
        self.ended: list[Request] = []
        self.num_rejected = 0
        self.num_plans = 0
        self.num_decode_tokens = 0

    @property
    def num_prefill_tokens(self) -> int:
        return self._prefill.num_tokens

    def plan(self, now_s: float) -> Dispatched | None:
        """The next step, or None if there is nothing to compute or to copy now."""
        draft = self._draft
        draft.begin()
        num_admissions = 0
        if len(self._waiting) or self._running.num_prefilling:
            num_admissions = self._decide_on_waiting(now_s)
        decoding: list[LiveRequest] = []
        prefill_rows: list[PrefillRow] = []
        prefilling: list[LiveRequest] = []
        is_short, columns = False, None
        if not self._policy.prefills_alone:
            decoding, is_short = self._select_decode_rows(now_s)
            columns = columns_of(decoding)
        if is_short:
            num_admissions = 0
        if num_admissions or self._running.num_prefilling:
            snapshot = self._table.snapshot(now_s, decoding, columns)
            budget = min(self._policy.budget(snapshot), self._limits.max_num_batched_tokens)
            budget -= len(decoding)
            self._table.forecast.observe_budget(
                budget, len(decoding), float(snapshot.decode_starts.sum())
            )
            prefill_rows, prefilling = self._prefill.plan(snapshot, budget, num_admissions)
            if draft.preempted_numbers:
                decoding = [e for e in decoding if e.number not in draft.preempted_numbers]
                self._forget_updates_of_others(decoding)
                columns = None
        if self._policy.prefills_alone and not prefill_rows:
            decoding, is_short = self._select_decode_rows(now_s)
        num_steps = 1
        if self._max_steps > 1 and decoding and not prefill_rows and not is_short:
            num_steps = self._choose_num_steps(decoding, now_s)
        if self._kv.host.num_pages:
            # Last: an evicted page is as it was only until this plan's rows write to it.
            self._transfers.spill(now_s)
        if not decoding and not prefill_rows and not draft.has_copies:
            return None
        decode_rows = self._decode_rows(decoding, columns or columns_of(decoding), num_steps)
        plan = StepPlan(
            step_id=self.num_plans,
            decode_rows=decode_rows,
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
        return Dispatched(plan, (*decoding, *prefilling), _features(decode_rows, prefill_rows))

    # Those who wait.

    def _decide_on_waiting(self, now_s: float) -> int:
        """Ends the waiting requests that the policy gives up; how many others may be admitted."""
        self._table.pin_overdue(now_s)
        admission = self._policy.admit(self._table.snapshot(now_s))
        for request, reason in admission.rejected:
            entry = self._table.entry(request)
            error = OverloadedError(
                f"request {request.request_id} {reason}", admission.retry_after_s
            )
            self._table.end(entry, RequestStatus.REJECTED, now_s, error=error)
            self.ended.append(request)
            self.num_rejected += 1
            self._draft.explain(request.request_id, Decision.REJECTED, reason)
        for request in admission.demoted:
            if request.status.is_finished:
                continue  # it was rejected, too
            entry = self._table.entry(request)
            if entry.is_demoted:
                continue
            if request.slot is None:
                self._waiting.demote(entry)
            entry.is_demoted = True
        limit = admission.limit
        return self._limits.max_num_seqs if limit is None else limit

    # Decode rows.

    def _select_decode_rows(self, now_s: float) -> tuple[list[LiveRequest], bool]:
        """Rows that decode, each with room for one more token; and whether pages ran short."""
        rows = self._running.decoding
        selected = [e for e in rows if e.request.num_computed_tokens < e.last_position]
        needy = [e for e in selected if e.request.num_computed_tokens >= e.pages.capacity]
        if len(needy) <= self._kv.num_available:
            for entry in needy:
                self._grow(entry, 1)
            return selected, False
        # A row whose last token is on its way is sure to give its pages back at a coming commit.
        # Then rows that find no page sit this step out: cheaper than computing anybody again.
        can_wait = len(selected) < len(rows)
        stalled: set[int] = set()
        for entry in in_order(self._table, self._policy, needy, self._table.snapshot(now_s)):
            if entry.request.slot is not None and not self._kv.num_available:
                if can_wait:
                    stalled.add(entry.number)
                    continue
                self.preemption.make_room(entry, now_s)
            if entry.request.slot is not None:
                self._grow(entry, 1)
        kept = [e for e in selected if e.request.slot is not None and e.number not in stalled]
        self._forget_updates_of_others(kept)
        return kept, True

    def _forget_updates_of_others(self, decoding: list[LiveRequest]) -> None:
        """Drops the page updates of rows that will not be in the plan."""
        slots = {entry.request.slot for entry in decoding}
        updates = self._draft.page_updates
        self._draft.page_updates = [update for update in updates if update[0] in slots]

    def _choose_num_steps(self, decoding: list[LiveRequest], now_s: float) -> int:
        """Decode iterations that limits and pool allow; adds the pages that all of them write."""
        left = [entry.last_position - entry.request.num_computed_tokens for entry in decoding]
        num_steps = self._policy.num_steps(
            self._table.snapshot(now_s), self._max_steps, max(left), min(left)
        )
        while num_steps > 1:
            needy = [
                entry
                for entry in decoding
                if entry.request.num_computed_tokens + num_steps > entry.pages.capacity
            ]
            num_missing = sum(self._num_missing(entry, num_steps) for entry in needy)
            if num_missing <= self._kv.num_available:
                for entry in needy:
                    self._grow(entry, num_steps)
                return num_steps
            num_steps //= 2
        return 1

    def _num_missing(self, entry: LiveRequest, num_steps: int) -> int:
        """Pages that the entry lacks for `num_steps` iterations."""
        end = min(entry.request.num_computed_tokens + num_steps, entry.last_position)
        return max(0, self._kv.num_pages_for(end) - len(entry.pages.page_ids))

    def _grow(self, entry: LiveRequest, num_steps: int) -> None:
        """Adds the pages that the entry lacks for `num_steps` iterations, and notes them."""
        request, index = entry.request, len(entry.pages.page_ids)
        assert request.slot is not None
        end = min(request.num_computed_tokens + num_steps, entry.last_position)
        for page in self._kv.grow(entry.pages, end):
            self._draft.page_updates.append((request.slot, index, page))
            index += 1

    def _decode_rows(
        self, decoding: list[LiveRequest], columns: Columns, num_steps: int
    ) -> DecodeRows:
        """The rows by column; their requests move ahead by what they may emit."""
        if not decoding:
            return self._no_rows
        requests = tuple([entry.request for entry in decoding])
        slots, starts = columns
        if self._policy.measure is not None:
            self._table.columns.refresh_lengths(decoding, slots, starts, self._table.forecast)
        if num_steps == 1:
            max_new_tokens = self._ones[: len(requests)]
            for request in requests:
                request.num_computed_tokens += 1
                request.num_inflight_tokens += 1
                request.num_inflight_steps += 1
            self.num_decode_tokens += len(requests)
        else:
            limits = np.array([entry.last_position for entry in decoding], np.int32)
            max_new_tokens = np.minimum(limits - starts, num_steps)
            counts = max_new_tokens.tolist()
            for request, count in zip(requests, counts, strict=True):
                request.num_computed_tokens += count
                request.num_inflight_tokens += count
                request.num_inflight_steps += 1
            self.num_decode_tokens += sum(counts)
        return DecodeRows(
            requests=requests, slots=slots, starts=starts, max_new_tokens=max_new_tokens
        )


def _features(decode_rows: DecodeRows, prefill_rows: list[PrefillRow]) -> StepFeatures:
    """What the step's time depends on."""
    return StepFeatures(
        num_decode=len(decode_rows),
        num_prefill=sum([row.num_tokens for row in prefill_rows]),
        decode_context=float(decode_rows.starts.sum()) if len(decode_rows) else 0.0,
        prefill_context=float(sum([row.num_tokens * row.start for row in prefill_rows])),
    )
