"""One step, decided from the live table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.live_table import LiveTable
from octavo.engine.scheduler.policies.policy import Policy
from octavo.engine.scheduler.step_plan import DecodeRows, PrefillRow, StepLimits, StepPlan
from octavo.engine.scheduler.step_size import decode_steps, prefill_chunk

MAX_HEADROOM_PAGES = 2
"""Pages for each running row that must stay free when a preempted request comes back: one after
its first preemption, this many from then on."""


class Dispatched(NamedTuple):
    """A plan, and the records of its rows' requests: decode rows first, then prefill rows."""

    plan: StepPlan
    entries: tuple[LiveRequest, ...]


class Planner:
    """Makes plans, and moves the host state ahead as if each had run.

    Rows decode first, then running prompts advance, then waiting requests are admitted in the
    policy's order; nobody overtakes one that does not fit. A request gets the pages of all its
    known tokens when it is admitted, so only decode rows ever run short of pages; then the
    policy's victims are preempted. The first in the order can evict everyone else and fits alone,
    so somebody always advances.

    Args:
        table: the state; changed by `plan`.
        limits: budgets that every plan holds to.
        policy: order and victims.
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
        self._enable_chunked_prefill = enable_chunked_prefill
        self._watermark_pages = watermark_pages
        self._max_steps = max_steps
        self._ones = np.ones(limits.max_num_seqs, np.int32)
        self._ones.flags.writeable = False
        self._no_rows = DecodeRows.of(())
        self._page_updates: list[tuple[int, int, int]] = []
        self._preempted: list[str] = []
        self.num_plans = 0
        self.num_prefill_tokens = 0
        self.num_decode_tokens = 0

    def plan(self, now_s: float) -> Dispatched | None:
        """The next step, or None if there is nothing to compute now."""
        self._page_updates.clear()
        decoding, is_short = self._select_decode_rows(now_s)
        budget = self._limits.max_num_batched_tokens - len(decoding)
        prefill_rows, prefilling = self._plan_prefill(budget, may_admit=not is_short, now_s=now_s)
        if not decoding and not prefill_rows:
            return None
        num_steps = 1
        if self._max_steps > 1 and not prefill_rows and not is_short:
            num_steps = self._choose_num_steps(decoding)
        plan = StepPlan(
            step_id=self.num_plans,
            decode_rows=self._decode_rows(decoding, num_steps),
            prefill_rows=prefill_rows,
            num_steps=num_steps,
            page_updates=tuple(self._page_updates),
            preempted=tuple(self._preempted),
        )
        self._preempted.clear()
        self.num_plans += 1
        return Dispatched(plan, (*decoding, *prefilling))

    def preempt(self, entry: LiveRequest) -> None:
        """Preempts a running request; the next plan names it."""
        self._preempted.append(entry.request.request_id)
        self._table.preempt(entry)

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
        for entry in self._in_order(needy, now_s):
            if entry.request.slot is not None and not self._kv.num_available:
                if can_wait:
                    stalled.add(entry.number)
                    continue
                self._make_room_for(entry, now_s)
            if entry.request.slot is not None:
                self._grow(entry, 1)
        kept = [e for e in selected if e.request.slot is not None and e.number not in stalled]
        slots = {entry.request.slot for entry in kept}
        self._page_updates = [update for update in self._page_updates if update[0] in slots]
        return kept, True

    def _make_room_for(self, entry: LiveRequest, now_s: float) -> None:
        """Preempts until a page is available, or until `entry` itself was the victim."""
        for victim in self._policy.choose_victims(self._table.snapshot(now_s), entry.request, 1):
            self.preempt(self._table.entry(victim))
            if victim is entry.request or self._kv.num_available:
                return
        self.preempt(entry)

    def _choose_num_steps(self, decoding: list[LiveRequest]) -> int:
        """Decode iterations that limits and pool allow; adds the pages that all of them write."""
        left = [entry.last_position - entry.request.num_computed_tokens for entry in decoding]
        num_steps = decode_steps(
            limit=self._max_steps,
            longest=max(left),
            shortest=min(left),
            someone_waits=len(self._waiting) > 0,
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
            self._page_updates.append((request.slot, index, page))
            index += 1

    def _decode_rows(self, decoding: list[LiveRequest], num_steps: int) -> DecodeRows:
        """The rows by column; their requests move ahead by what they may emit."""
        if not decoding:
            return self._no_rows
        requests = tuple([entry.request for entry in decoding])
        slots = np.array([request.slot for request in requests], np.int32)
        starts = np.array([request.num_computed_tokens for request in requests], np.int32)
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

    # Prefill rows.

    def _plan_prefill(
        self, budget: int, *, may_admit: bool, now_s: float
    ) -> tuple[tuple[PrefillRow, ...], list[LiveRequest]]:
        """Chunks of running prompts, then of newly admitted ones, within `budget` tokens."""
        rows: list[PrefillRow] = []
        entries: list[LiveRequest] = []

        def has_room() -> bool:
            return budget > 0 and len(rows) < self._limits.max_prefill_rows

        for entry in self._in_order(self._running.prefilling, now_s):
            if not has_room():
                break
            rows.append(self._prefill_row(entry, budget, is_new=False))
            entries.append(entry)
            budget -= rows[-1].num_tokens
        if may_admit and has_room() and self._running.has_free_slot:
            for entry in self._candidates(now_s):
                if not self._try_to_admit(entry, budget, now_s):
                    break
                rows.append(self._prefill_row(entry, budget, is_new=True))
                entries.append(entry)
                budget -= rows[-1].num_tokens
                if not has_room() or not self._running.has_free_slot:
                    break
        return tuple(rows), entries

    def _try_to_admit(self, entry: LiveRequest, budget: int, now_s: float) -> bool:
        """Admits a waiting request if step and pool have room for it."""
        request = entry.request
        if request.num_inflight_steps:
            return False  # preempted in flight: its tokens are not all known yet
        num_known = request.num_tokens
        matched = self._kv.match_prefix(entry.pages)
        fits_a_step = num_known <= self._limits.max_num_batched_tokens
        if not self._enable_chunked_prefill and fits_a_step:
            num_missing = num_known - len(matched) * self._limits.page_size
            if num_missing > budget:
                return False
        needed = self._kv.num_pages_to_take(matched, num_known)
        if len(self._running):
            # A preempted request comes back only to a pool that leaves the others room to grow.
            pages_per_row = min(request.metrics.num_preemptions, MAX_HEADROOM_PAGES)
            needed += self._watermark_pages + pages_per_row * len(self._running)
        if needed > self._kv.num_available:
            return False
        self._table.admit(entry, matched, now_s)
        return True

    def _prefill_row(self, entry: LiveRequest, budget: int, *, is_new: bool) -> PrefillRow:
        """The entry's next chunk; its request moves ahead by it."""
        request = entry.request
        assert request.slot is not None
        start, end = request.num_computed_tokens, entry.prefill_end
        num_tokens = prefill_chunk(start, end, budget, self._limits.page_size)
        samples = start + num_tokens == end
        request.num_computed_tokens += num_tokens
        request.num_inflight_steps += 1
        self.num_prefill_tokens += num_tokens
        if samples:
            request.num_inflight_tokens += 1
            self._running.end_prefill(entry)
        return PrefillRow(
            request=request,
            slot=request.slot,
            start=start,
            num_tokens=num_tokens,
            samples=samples,
            is_new=is_new,
            page_ids=tuple(entry.pages.page_ids) if is_new else (),
        )

    # The policy's order.

    def _candidates(self, now_s: float) -> Iterator[LiveRequest]:
        """Waiting requests, first to be admitted first; each is admitted before the next one."""
        if self._policy.place is not None:
            while len(self._waiting):
                yield self._waiting.head
        else:
            snapshot = self._table.snapshot(now_s)
            for request in self._policy.order(snapshot, snapshot.waiting):
                yield self._table.entry(request)

    def _in_order(self, entries: Sequence[LiveRequest], now_s: float) -> Sequence[LiveRequest]:
        """`entries`, first to be served first."""
        if len(entries) < 2:
            return entries
        accepted = sorted(entries, key=lambda entry: entry.number)
        place = self._policy.place
        if place is not None:
            return sorted(accepted, key=lambda entry: place(entry.request))
        requests = [entry.request for entry in accepted]
        ordered = self._policy.order(self._table.snapshot(now_s), requests)
        return [self._table.entry(request) for request in ordered]
