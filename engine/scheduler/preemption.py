"""Taking rows and pages from running requests, and who they go to."""

from __future__ import annotations

from collections.abc import Callable, Collection

from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.plan_builder import PlanBuilder
from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.request_table import RequestTable
from octavo.engine.scheduler.step_plan import Decision
from octavo.engine.scheduler.transfers import Transfers


class Preemption:
    """Carries out a policy's choice of victims.

    Args:
        table: the state; changed.
        flush: enters what the plan has decided so far; victims are chosen from that.
        transfers: begins the copies of those that are swapped.
        builder: the plan under construction, which names the victims.
    """

    def __init__(
        self,
        table: RequestTable,
        flush: Callable[[], None],
        transfers: Transfers,
        builder: PlanBuilder,
    ) -> None:
        self._table = table
        self._kv = table.kv
        self._flush = flush
        self._transfers = transfers
        self._builder = builder

    def make_room(self, entry: LiveRequest, now_s: float, num_pages: int) -> None:
        """For a row in need of pages: preempts until so many are available, or itself.

        Whoever is chosen, somebody advances: the one in need goes last.
        """
        table = self._table
        snapshot = self._snapshot_of_all(now_s)
        for victim in table.places.policy.choose_victims(snapshot, entry.request, num_pages):
            chosen = table.live.entry(victim)
            if not table.rows.is_arriving(chosen):
                self.preempt(chosen, now_s, snapshot, entry)
            if chosen is entry or self._kv.num_available >= num_pages:
                return
        self.preempt(entry, now_s, snapshot, entry)

    def may_preempt_for(self, entry: LiveRequest, snapshot: Snapshot) -> bool:
        """Whether anybody might give way to a waiting request: asked before it is seen who.

        A demoted request takes nobody's place: two of them would take each other's for ever.
        """
        if entry.is_demoted and not entry.is_pinned:
            return False
        table, policy = self._table, self._table.places.policy
        rules_out = policy.rules_out_victims
        if rules_out is None or not rules_out(snapshot, entry.request):
            self._flush()
            if policy.may_choose_victims(snapshot, entry.request):
                return True
            if rules_out is not None:
                table.rows.tighten()  # it could not say so
        rows = table.rows
        return rows.num_prefilling > 0 and any(prompt.is_behind for prompt in rows.prefilling)

    def preempt_for(
        self,
        entry: LiveRequest,
        num_pages: int,
        snapshot: Snapshot,
        planned: Collection[LiveRequest],
    ) -> bool:
        """For a waiting request that lacks `num_pages` pages (or a row): preempts for it.

        Args:
            planned: entries that have a row in this plan already, and so keep it.

        Returns:
            Whether anybody gave way. What was freed is enough if the policy counted right.
        """
        table = self._table
        if not self.may_preempt_for(entry, snapshot):
            return False
        # Others may have given way since the snapshot was taken.
        snapshot = self._snapshot_of_all(snapshot.now_s)
        victims = table.places.policy.choose_victims(snapshot, entry.request, num_pages)
        chosen = [table.live.entry(victim) for victim in victims if victim is not entry.request]
        is_arriving = table.rows.is_arriving
        if not chosen or any(is_arriving(victim) or victim in planned for victim in chosen):
            return False
        for victim in chosen:
            self.preempt(victim, snapshot.now_s, snapshot, entry)
        return True

    def _snapshot_of_all(self, now_s: float) -> Snapshot:
        """What victims are chosen from: every row that decodes, and who was admitted just now."""
        self._flush()
        return self._table.snapshot(now_s, self._table.rows.all_decode_rows())

    def preempt(
        self,
        victim: LiveRequest,
        now_s: float,
        snapshot: Snapshot | None = None,
        beneficiary: LiveRequest | None = None,
    ) -> None:
        """Takes slot and pages from a running request; the next plan names it.

        Without a snapshot there is nothing left to copy: the device's pages are gone.
        """
        request, builder = victim.request, self._builder
        swaps = (
            snapshot is not None
            and self._kv.host.num_pages > 0
            and request.num_computed_tokens > 0
            and self._table.places.policy.swap_or_recompute(snapshot, request)
            and self._transfers.swap_out(victim, now_s)
        )
        num_tokens = request.num_computed_tokens
        cost_s = self._cost_s(num_tokens, swaps=swaps)
        (builder.counts.swaps if swaps else builder.counts.recomputes).add(num_tokens, cost_s)
        builder.preempted.append(request.request_id)
        builder.preempted_numbers.add(victim.number)
        if builder.explains and snapshot is not None:
            builder.explain(
                request.request_id,
                Decision.PREEMPTED,
                "its pages are copied to the host" if swaps else "it will be computed again",
                beneficiary="" if beneficiary is None else beneficiary.request.request_id,
                num_tokens=num_tokens,
                cost_s=cost_s,
            )
        self._table.preempt(victim, now_s)

    def _cost_s(self, num_tokens: int, *, swaps: bool) -> float:
        """Seconds expected for a victim's pages to go to the host and come back, or for its tokens
        to be computed again if none of them is found in the prefix cache."""
        forecast = self._table.forecast
        if swaps:
            return 2 * self._kv.needs.held(num_tokens) * forecast.page_copy_s
        return forecast.prefill_s(num_tokens)
