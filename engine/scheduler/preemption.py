"""Taking rows and pages from running requests, and which requests they go to."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from octavo.engine.scheduler.live_request import LiveRequest
from octavo.engine.scheduler.plan_builder import PlanBuilder
from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.request_table import RequestTable
from octavo.engine.scheduler.step_plan import Decision
from octavo.engine.scheduler.transfers import Transfers

MAX_ATTEMPTS = 4
"""Waiting requests for which one plan looks for victims."""

ROWS_PER_WAITED_PLAN = 64
"""For each of so many rows a plan passes before victims are looked for again for the same request
among the same rows: looking costs by the row."""


class _Refused(NamedTuple):
    """For whom victims were looked for in vain, among which rows, and how many plans ago."""

    number: int
    num_changes: int
    num_plans: int


class Preemption:
    """Looks for victims, and carries out the policy's choice.

    A row that needs pages to go on always gets victims, or is one itself (`make_room`). For waiting
    requests (`preempt_for`) a plan looks a few times only.

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
        self._num_attempts = 0
        self._refused = _Refused(-1, -1, 0)

    def begin(self) -> None:
        """A plan comes to its prompts: victims may be looked for again for waiting requests."""
        self._num_attempts = 0

    def make_room(self, entry: LiveRequest, now_s: float, num_pages: int) -> None:
        """For a row in need of pages: preempts until so many are available, or itself.

        Whatever the policy chooses, some row advances: the one in need goes last.
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

    @property
    def may_look(self) -> bool:
        """Whether victims may be looked for (once more) for waiting requests in this plan."""
        return self._table.places.policy.preempts_for_waiting and not self.is_exhausted

    @property
    def is_exhausted(self) -> bool:
        """Whether this plan looks for no more victims for waiting requests."""
        return self._num_attempts >= MAX_ATTEMPTS

    def may_preempt_for(self, entry: LiveRequest, snapshot: Snapshot) -> bool:
        """Whether any row might give way to a waiting request: asked before it is seen which."""
        if self._was_refused(entry):
            return False
        if self._may_find(entry, snapshot):
            return True
        self._note_refusal(entry, self._table.rows.num_changes)
        return False

    def preempt_for(
        self,
        entry: LiveRequest,
        num_pages: int,
        snapshot: Snapshot,
        planned: Collection[LiveRequest],
    ) -> bool:
        """For a waiting request that lacks `num_pages` pages (or a row): preempts for it, unless
        victims were looked for in vain just now and nothing has changed since.

        Args:
            planned: entries that have a row in this plan already, and so keep it.

        Returns:
            Whether any row gave way. What was freed is enough if the policy counted right.
        """
        if not self.may_look or self._was_refused(entry):
            return False
        num_changes = self._table.rows.num_changes
        if not self._preempt_for(entry, num_pages, snapshot, planned):
            self._note_refusal(entry, num_changes)
            return False
        self._num_attempts += 1
        return True

    def _may_find(self, entry: LiveRequest, snapshot: Snapshot) -> bool:
        if entry.is_demoted and not entry.is_pinned:
            return False  # two of them would take each other's place for ever
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

    def _preempt_for(
        self,
        entry: LiveRequest,
        num_pages: int,
        snapshot: Snapshot,
        planned: Collection[LiveRequest],
    ) -> bool:
        if not self._may_find(entry, snapshot):
            return False
        # Others may have given way since the snapshot was taken.
        snapshot = self._snapshot_of_all(snapshot.now_s)
        victims = self._table.places.policy.choose_victims(snapshot, entry.request, num_pages)
        chosen = [self._table.live.entry(each) for each in victims if each is not entry.request]
        is_arriving = self._table.rows.is_arriving
        if not chosen or any(is_arriving(victim) or victim in planned for victim in chosen):
            return False
        for victim in chosen:
            self.preempt(victim, snapshot.now_s, snapshot, entry)
        return True

    def _note_refusal(self, entry: LiveRequest, num_changes: int) -> None:
        """Victims were looked for in vain, among rows that had changed so many times."""
        self._num_attempts += 1
        if self._patience:
            # Requests behind it have less of a claim, and looking costs too much to try them all.
            self._refused = _Refused(entry.number, num_changes, 0)
            self._num_attempts = MAX_ATTEMPTS

    @property
    def _patience(self) -> int:
        """Plans to pass before victims are looked for again for the same request."""
        return len(self._table.rows) // ROWS_PER_WAITED_PLAN

    def _was_refused(self, entry: LiveRequest) -> bool:
        """Whether victims were looked for in vain a few plans ago, and nothing has changed since.

        Then this plan looks for no more of them.
        """
        refused = self._refused
        if refused.number != entry.number or refused.num_changes != self._table.rows.num_changes:
            return False
        if refused.num_plans >= self._patience:
            return False
        self._refused = refused._replace(num_plans=refused.num_plans + 1)
        self._num_attempts = MAX_ATTEMPTS
        return True

    def _snapshot_of_all(self, now_s: float) -> Snapshot:
        """What victims are chosen from: all rows that decode, and requests admitted just now."""
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
