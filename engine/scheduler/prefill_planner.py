"""The prompts of a step: which of them advance, by how many tokens, and which are admitted.

Admission is one decision with many conditions (rows, pages, headroom, prefixes that another prompt
computes, victims), each of which ends the same attempt.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from octavo.engine.kv.prefix_lookup import PrefixMatch
from octavo.engine.request import COMPUTED, INFLIGHT_STEPS, Request
from octavo.engine.scheduler.live_request import ALWAYS_READY, LiveRequest
from octavo.engine.scheduler.pending_updates import PendingUpdates
from octavo.engine.scheduler.plan_builder import PlanBuilder
from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.preemption import Preemption
from octavo.engine.scheduler.request_order import RequestOrder
from octavo.engine.scheduler.request_table import RequestTable
from octavo.engine.scheduler.rows import Rows
from octavo.engine.scheduler.step_plan import Decision, PrefillRow
from octavo.engine.scheduler.transfers import Transfers

MAX_FOLLOWERS = 64
"""Waiting requests that one plan passes over, as running prompts compute what they begin with."""


class Prompts(NamedTuple):
    """Prompts of a step.

    Attributes:
        rows: their chunks.
        entries: whose they are.
    """

    rows: list[PrefillRow]
    entries: list[LiveRequest]


NO_PROMPTS = Prompts([], [])


class PrefillPlanner:
    """Chunks of running prompts and of newly admitted ones, within a budget of tokens.

    A request gets the pages of all its known tokens when it is admitted. Running prompts come
    first, unless the policy lets a waiting request go before them.

    Args:
        table: the state; changed.
        pending: notes requests that were admitted, and chunks.
        preemption: carries out the choice of victims.
        transfers: brings back pages from the host.
        builder: the plan under construction.
        order: says which prompt comes next.
        enable_chunked_prefill: split prompts over steps. Without it, only a preempted request that
            has outgrown a step is split.
        watermark_pages: pages that admission leaves free for running rows to grow into.
    """

    def __init__(
        self,
        table: RequestTable,
        pending: PendingUpdates,
        preemption: Preemption,
        transfers: Transfers,
        builder: PlanBuilder,
        order: RequestOrder,
        *,
        enable_chunked_prefill: bool,
        watermark_pages: int,
    ) -> None:
        self._table = table
        self._kv = table.kv
        self._row_table = table.rows
        self._limits = table.limits
        self._pending = pending
        self._preemption = preemption
        self._transfers = transfers
        self._builder = builder
        self._enable_chunked_prefill = enable_chunked_prefill
        self._watermark_pages = watermark_pages
        self._chunks_prompts = False
        self._order = order
        self._num_admissions = self._num_skipped = self._num_followers = 0
        self._planned = NO_PROMPTS
        self._most_headroom: float | None = None

    def plan(self, snapshot: Snapshot, decoding: Rows, num_admissions: int) -> Prompts:
        """The step's chunks, with the records of their requests.

        Args:
            decoding: rows that decode in the same step.
            num_admissions: most waiting requests to admit.
        """
        policy, order = self._table.places.policy, self._order
        budget = self._budget(snapshot, decoding)
        order.may_admit = num_admissions > 0 and self._has_use_in_trying
        if not order.may_admit and not self._row_table.num_prefilling:
            return NO_PROMPTS  # as in most steps where all rows decode
        self._chunks_prompts = self._enable_chunked_prefill and policy.chunks_prompts
        self._num_admissions, self._most_headroom = num_admissions, None
        self._num_skipped = self._num_followers = 0
        self._preemption.begin()
        self._planned = prompts = Prompts([], [])
        order.below_quota.clear()
        preempted, advanced = self._builder.preempted_numbers, self._pending.advanced
        most_rows = self._limits.max_prefill_rows
        left = self._limits.max_num_batched_tokens - len(decoding)
        # A prompt that is not split may be longer than the policy's budget ever is.
        may_exceed = not self._chunks_prompts and not len(decoding)
        for entry in order.candidates(snapshot):
            if entry.goes_on and left > 0:
                budget = max(budget, 1)  # as it would get if it decoded
            most = left if may_exceed and not prompts.rows else budget
            if most <= 0 or len(prompts.rows) >= most_rows:
                break
            if entry.request.slot is None:
                if not self._let_in(entry, most, snapshot):
                    continue
            elif entry.number in preempted:
                continue
            row = self._row(entry, most, snapshot)
            if row is None:
                continue
            prompts.rows.append(row)
            prompts.entries.append(entry)
            advanced(entry, row)
            budget -= row.num_tokens
            left -= row.num_tokens
            if entry.is_demoted:
                self._pending.flush()  # whether it is still among the prompts may be asked
        return prompts

    def _budget(self, snapshot: Snapshot, decoding: Rows) -> int:
        """Tokens that the step has for prompts beside its decode rows."""
        table, num_decode = self._table, len(decoding)
        table.renew(snapshot)
        snapshot.decoding = decoding
        budget = min(table.places.policy.budget(snapshot), self._limits.max_num_batched_tokens)
        table.forecast.observe_budget(budget - num_decode, num_decode, decoding.context)
        return budget - num_decode

    def _let_in(self, entry: LiveRequest, budget: int, snapshot: Snapshot) -> bool:
        """Admits a waiting request whose turn it is, if it may come in and can; ends admission if
        nobody may come after it.

        Returns:
            Whether it has a prompt to compute in this step.
        """
        order, builder, free_slots = self._order, self._builder, self._row_table.free_slots
        if entry.ready_position != ALWAYS_READY and entry.is_blocked:
            return False  # in nobody's way: what it waits for is no matter of room
        if (entry.leaders or entry.is_stale) and self._awaits_leader(entry, snapshot):
            # Nor is it in anybody's way, unless it comes before everybody.
            self._num_followers += 1
            self._num_admissions -= 1
            is_over = entry.is_pinned or self._num_followers >= MAX_FOLLOWERS
            order.may_admit &= self._num_admissions > 0 and not is_over
            return False
        was_preempted = entry.number in builder.preempted_numbers
        if was_preempted or not self._try_to_admit(entry, budget, snapshot):
            self._num_skipped += 1
            is_over = self._num_skipped > self._table.places.policy.max_skipped or entry.is_pinned
            # What comes free is kept for a class that has less than its quota.
            is_over |= entry.request.priority in order.below_quota
            if builder.explains:
                builder.waited(entry.number, entry.request.request_id, self._lacked)
            order.may_admit = not (is_over or self._is_full)
            return False
        self._num_admissions -= 1
        if self._num_admissions == 0 or not free_slots:
            order.may_admit = self._num_admissions > 0 and self._has_use_in_trying
        return not entry.pages.arriving

    def _try_to_admit(self, entry: LiveRequest, budget: int, snapshot: Snapshot) -> bool:
        """Admits a waiting request if step and pool have room for it, or can be given room."""
        request, kv, free_slots = entry.request, self._kv, self._row_table.free_slots
        if not free_slots and not self._preemption.may_look:
            return False
        if request.counts[INFLIGHT_STEPS]:
            return False  # preempted in flight: its tokens are not all known yet
        if entry.pages.host_pages and not entry.pages.is_on_host:
            return False  # still being copied to the host
        num_known = request.num_tokens
        if not self._chunks_prompts and num_known <= self._limits.max_num_batched_tokens:
            num_cached = len(kv.lookup.match(entry.pages, num_known)) * self._limits.page_size
            if num_known - num_cached > budget:
                return False
        if not free_slots and not self._preemption.may_preempt_for(entry, snapshot):
            return False  # whatever room it would need besides
        matched = kv.lookup.match(entry.pages, num_known)
        needed, num_available = kv.num_pages_to_take(matched, num_known), kv.pool.num_available
        if needed > num_available and not self._preemption.may_look:
            return False  # without a look at how much room the policy wants besides
        if len(free_slots) < self._limits.max_num_seqs:
            policy, kept = self._table.places.policy, self._watermark_pages
            if needed + kept <= num_available or not policy.may_use_watermark(snapshot, request):
                needed += kept
            # What is wanted besides takes long to say exactly, and as a rule there is more.
            if needed + self._headroom_bound(request, snapshot) > num_available:
                needed += policy.headroom(snapshot, request)
        if needed > num_available or not free_slots:
            num_lacking = max(needed - num_available, 0)
            planned = self._planned.entries
            if not self._preemption.preempt_for(entry, num_lacking, snapshot, planned):
                return False
            matched = kv.lookup.match(entry.pages, num_known)
            needed = kv.num_pages_to_take(matched, num_known)
            if needed > kv.num_available or not free_slots:
                return False
        self._admit(entry, num_known, matched, snapshot)
        return True

    def _awaits_leader(self, entry: LiveRequest, snapshot: Snapshot) -> bool:
        """Whether a waiting request is passed over, as a running prompt computes its next page."""
        leader = self._table.work.leader_to_await(entry, snapshot.starts_s)
        if leader is None:
            return False
        self._order.below_quota.discard(entry.request.priority)
        if self._builder.explains:
            text = f"for what it shares with {leader.request.request_id}"
            self._builder.waited(entry.number, entry.request.request_id, text)
        return True

    def _headroom_bound(self, request: Request, snapshot: Snapshot) -> float:
        """Pages that the policy's headroom for a request is not above."""
        if self._builder.preempted_numbers:
            # Slots of the snapshot have another holder by now, who must be in the columns.
            self._pending.flush()
            return math.inf
        most = self._most_headroom
        if most is None:
            ask = self._table.places.policy.most_headroom
            most = self._most_headroom = math.inf if ask is None else ask(snapshot)
        return most + self._kv.needs.growth(request.max_tokens)

    @property
    def _lacked(self) -> str:
        """Why nobody more was admitted just now."""
        return "for pages" if self._row_table.free_slots else "for a row"

    @property
    def _has_use_in_trying(self) -> bool:
        """Whether a waiting request could be admitted, or told what it waits for."""
        return (
            len(self._row_table.free_slots) > 0
            or self._table.places.policy.preempts_for_waiting
            or self._builder.explains
        )

    @property
    def _is_full(self) -> bool:
        """Whether there is no row for anybody, and no use in looking for victims any more."""
        return not self._row_table.free_slots and self._preemption.is_exhausted

    def _admit(
        self, entry: LiveRequest, num_known: int, matched: PrefixMatch, snapshot: Snapshot
    ) -> None:
        """Moves the entry to a slot, and begins to bring back what the host holds of it."""
        now_s = snapshot.now_s
        if self._kv.host.num_pages:
            self._admit_from_host(entry, num_known, matched, snapshot)
        else:
            self._table.admit(entry, num_known, matched)
            self._pending.admitted(entry, now_s)
        if self._builder.explains:
            request, pages = entry.request, entry.pages
            was_preempted = request.metrics.num_preemptions > 0
            self._builder.admitted(entry.number)
            self._builder.explain(
                request.request_id,
                Decision.RESUMED if was_preempted else Decision.ADMITTED,
                f"after {now_s - entry.waiting_since_s:.3f} s in the queue"
                + (", its pages come back from the host" if pages.arriving else ""),
                num_tokens=request.num_computed_tokens,
            )

    def _admit_from_host(
        self, entry: LiveRequest, num_known: int, matched: PrefixMatch, snapshot: Snapshot
    ) -> None:
        pages, num_matched, now_s = entry.pages, len(matched), snapshot.now_s
        recalled = [] if pages.is_on_host else self._kv.lookup.host_match(pages, num_matched)
        self._table.admit(entry, num_known, matched)
        self._pending.admitted(entry, now_s)
        self._pending.flush()
        num_back = self._kv.num_to_bring_back(pages, num_matched) if pages.is_on_host else 0
        if num_back:
            self._serve_pages(entry, num_back)
            self._transfers.swap_in(entry, num_matched, now_s)
            self._row_table.begin_arrival(entry)
        elif pages.is_on_host:
            self._kv.drop_host_copy(pages)
        elif recalled and self._is_worth_recalling(len(recalled), snapshot):
            self._serve_pages(entry, len(recalled))
            if not entry.request.metrics.num_preemptions:
                # They were charged to the tenant with what the device's cache lacks.
                num_tokens = len(recalled) * self._limits.page_size
                self._table.tenants.serve(entry.tenant, -num_tokens, 0)
            self._transfers.recall(entry, recalled, num_matched, now_s)
            self._row_table.begin_arrival(entry)

    def _serve_pages(self, entry: LiveRequest, num_pages: int) -> None:
        """Counts pages that come back from the host as if their tokens were computed."""
        num_tokens = num_pages * self._limits.page_size // self._kv.needs.num_groups
        self._table.quotas.serve([(entry.request.priority, num_tokens)])

    def _is_worth_recalling(self, num_pages: int, snapshot: Snapshot) -> bool:
        forecast, page_size = snapshot.forecast, self._limits.page_size
        return num_pages * forecast.page_copy_s < forecast.prefill_s(num_pages * page_size)

    def _row(self, entry: LiveRequest, budget: int, snapshot: Snapshot) -> PrefillRow | None:
        """The entry's next chunk; None if there are no pages for it, so that it is preempted."""
        request, slot, pages = entry.request, entry.request.slot, entry.pages
        assert slot is not None
        start, end = int(request.counts[COMPUTED]), entry.prefill_end
        num_tokens = end - start
        most = self._table.places.policy.chunk(snapshot, request, num_tokens, budget)
        assert 1 <= most <= budget, (most, budget)
        if self._kv.has_windows:
            # As a rule all that was given back came back to it. Others may hold some of that.
            most = min(most, self._kv.reach_ahead(pages, end) - start)
            if most <= 0:
                self._preemption.preempt(entry, snapshot.now_s, snapshot)
                return None
        if num_tokens > most:
            num_tokens = prefill_chunk(start, end, most, self._limits.page_size)
        samples = start + num_tokens == end
        if not samples and self._builder.explains:
            self._builder.explain(
                request.request_id,
                Decision.CHUNKED,
                f"{end - start - num_tokens} tokens of its prompt are left",
                num_tokens=num_tokens,
            )
        is_new = not entry.is_placed
        page_ids: tuple[int, ...] = ()
        if is_new:
            page_ids = pages.all_tables()
        elif self._kv.has_windows:
            needs = self._kv.needs
            first, end = needs.num_positions(start), needs.num_positions(start + num_tokens)
            for index in range(first, end):
                self._builder.add_pages(slot, index, pages)
        restored: int | None = None
        saved: tuple[tuple[int, int], ...] = ()
        if (snapshots := self._kv.snapshots) is not None:
            # A row that goes on has its state.
            begins = is_new and not entry.goes_on
            restored = snapshots.restored(pages, start) if begins else None
            saved = snapshots.saved(pages, start, start + num_tokens, entry.prefill_end)
        return PrefillRow(
            request, slot, start, num_tokens, samples, is_new, page_ids, restored, saved
        )


def prefill_chunk(start: int, end: int, budget: int, page_size: int) -> int:
    """Tokens to compute of a row whose known tokens from `start` to `end` - 1 are missing.

    A chunk that does not reach the end stops at a page boundary if it can: the page is then
    findable by others at once. It is never empty.

    Args:
        start, end: positions, `start` < `end`.
        budget: tokens left in the step, ≥ 1.
    """
    if end - start <= budget:
        return end - start
    boundary = (start + budget) // page_size * page_size
    return boundary - start if boundary > start else budget
