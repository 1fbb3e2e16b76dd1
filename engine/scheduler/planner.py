"""One step, decided from the request table: the pipeline that a plan is made in."""

from __future__ import annotations

from octavo.engine.request import RequestStatus
from octavo.engine.scheduler.decode_planner import DecodePlanner
from octavo.engine.scheduler.pending_updates import PendingUpdates
from octavo.engine.scheduler.plan_builder import Dispatched, PlanBuilder
from octavo.engine.scheduler.policy import Admission, Snapshot, admit_everyone
from octavo.engine.scheduler.preemption import Preemption
from octavo.engine.scheduler.prefill_planner import NO_PROMPTS, PrefillPlanner
from octavo.engine.scheduler.refusals import Refusals
from octavo.engine.scheduler.request_order import RequestOrder
from octavo.engine.scheduler.request_table import RequestTable
from octavo.engine.scheduler.rows import NO_ROWS
from octavo.engine.scheduler.step_plan import Decision
from octavo.engine.scheduler.transfers import Transfers

ANY_NUMBER = 1 << 30
"""Of admissions: as many as there is room for."""


class Planner:
    """Makes plans, each in one pass whose parts count on what those before them have taken.

    Requests that are overdue or late come first, then the rows that decode and the pages that they
    need, then prompts: running ones, and waiting requests in the policy's order; nobody overtakes
    one that does not fit, unless the policy allows it. What no plan waits for is left to
    `PendingUpdates`.

    Args:
        table: the state; changed by `plan`.
        pending: what plans leave to be entered later.
        transfers: copies to and from the host.
        builder: collects what the plan says.
        refusals: makes the errors of requests that are rejected.
        enable_chunked_prefill: split prompts over steps. Without it, only a preempted request that
            has outgrown a step is split.
        watermark_pages: pages that admission leaves free for running rows to grow into.
        max_steps: most decode iterations in one dispatch.
    """

    def __init__(
        self,
        table: RequestTable,
        pending: PendingUpdates,
        transfers: Transfers,
        builder: PlanBuilder,
        refusals: Refusals,
        *,
        enable_chunked_prefill: bool,
        watermark_pages: int,
        max_steps: int,
    ) -> None:
        self._table = table
        self._pending = pending
        self._transfers = transfers
        self._builder = builder
        self._refusals = refusals
        self.preemption = Preemption(table, pending.flush, transfers, builder)
        order = RequestOrder(table)
        self._decode = DecodePlanner(
            table, pending, self.preemption, builder, order, max_steps=max_steps
        )
        self._prefill = PrefillPlanner(
            table,
            pending,
            self.preemption,
            transfers,
            builder,
            order,
            enable_chunked_prefill=enable_chunked_prefill,
            watermark_pages=watermark_pages,
        )
        self._snapshot = table.snapshot(0.0)  # of each plan, in turn

    def plan(self, now_s: float) -> Dispatched | None:
        """The next step, or None if there is nothing to compute or to copy now."""
        table, builder, snapshot = self._table, self._builder, self._snapshot
        rows, decodes_beside = table.rows, not table.places.policy.prefills_alone
        builder.begin()
        self._pending.begin(snapshot)
        snapshot.now_s = now_s

        lacks_pages = len(rows.lacking_pages) > 0 and self._decode.give_pages(snapshot)
        num_admissions = 0
        if len(table.waiting) or rows.num_prefilling:
            num_admissions = self._overdue_and_late(snapshot)

        decoding, is_short = NO_ROWS, False
        if decodes_beside:
            decoding, is_short = self._decode.select(snapshot)
        is_short |= lacks_pages

        prompts = NO_PROMPTS
        if (num_admissions and not is_short) or rows.num_prefilling:
            prompts = self._prefill.plan(snapshot, decoding, 0 if is_short else num_admissions)
            if builder.preempted_numbers:
                decoding = self._decode.still_running(decoding)
        if not decodes_beside and not prompts.rows:
            decoding, is_short = self._decode.select(snapshot)
            is_short |= lacks_pages

        num_steps = 1
        if len(decoding) and not prompts.rows and not is_short:
            num_steps = self._decode.choose_num_steps(decoding, snapshot)
        if table.kv.host.num_pages:
            # Last: an evicted page is as it was only until this plan's rows write to it.
            self._transfers.spill(now_s)

        if not len(decoding) and not prompts.rows and not builder.has_copies:
            return None
        decode_rows = self._decode.by_column(decoding, num_steps)
        plan = builder.build(decode_rows, prompts.rows, num_steps)
        dispatched = Dispatched(plan, now_s, decoding, prompts.entries)
        self._pending.planned(dispatched)
        return dispatched

    def _overdue_and_late(self, snapshot: Snapshot) -> int:
        """Pins requests that have waited their longest; rejects, demotes and restores others by the
        policy.

        Returns:
            How many others may be admitted.
        """
        table, builder, probes = self._table, self._builder, self._refusals.probes
        table.places.pin_overdue(snapshot.now_s, table.held)
        if table.places.policy.admit is admit_everyone:
            return ANY_NUMBER
        admission = self._ask_for_admission(snapshot)
        for request, reason in admission.rejected:
            entry = table.live.entry(request)
            if probes.takes(request, builder.counts.num_computed_tokens):
                if entry.is_demoted:
                    table.promote(entry)
                continue
            error = self._refusals.overloaded(table, request, reason, snapshot.now_s)
            table.end(entry, RequestStatus.REJECTED, snapshot.now_s, error=error)
            builder.ended.append(request)
            builder.counts.num_rejected += 1
            builder.explain(request.request_id, Decision.REJECTED, reason)
        for request in admission.demoted:
            if request.status.is_finished or probes.has(request):
                continue  # it was rejected, too, or is served to see
            entry = table.live.entry(request)
            if not entry.is_demoted:
                table.demote(entry)
        for request in admission.restored:
            table.promote(table.live.entry(request))
        return ANY_NUMBER if admission.limit is None else admission.limit

    def _ask_for_admission(self, snapshot: Snapshot) -> Admission:
        """What the policy makes of waiting requests. None is rejected or demoted by an estimate of
        its work that is not up to date."""
        table = self._table
        while True:
            table.renew(snapshot)
            admission = table.places.policy.admit(snapshot)
            dropped = [request for request, _ in admission.rejected]
            dropped += admission.demoted
            if not dropped or not table.work.num_stale:
                return admission
            waiting = [table.live.entry(request) for request in dropped if request.slot is None]
            if not sum([table.work.bring_up_to_date(entry) for entry in waiting]):
                return admission
