"""Every live request and every transition it can make: accepted, admitted, preempted, ended.

It is one long module because each transition keeps the same queue, rows, columns, pages and counts
in step; what each of them is has a module of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.kv.prefix_match import PrefixMatch
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.request import COMPUTED, Request, RequestStatus, no_counts
from octavo.engine.scheduler.deadlines import has_target, was_in_time
from octavo.engine.scheduler.fairness import ClassQuotas, MaximumWait
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.live_request import LiveRequest, Place
from octavo.engine.scheduler.policy import Policy, Snapshot
from octavo.engine.scheduler.remaining_work import RemainingWork
from octavo.engine.scheduler.row_table import RowTable
from octavo.engine.scheduler.rows import NO_ROWS, Rows
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.scheduler.waiting_columns import WaitingFigures
from octavo.engine.scheduler.waiting_queue import WaitingQueue


class RequestTable:
    """The state that plans are made from. A live request is either waiting or running.

    Slots and pages return to their pools at once, even while a dispatched step still names them:
    the device runs steps in dispatch order, so the next holder's data comes after that step.

    Args:
        limits: what a step can take.
        policy: gives waiting requests their places. Plans ask the table for it.
        kv: owner of the pages.
        forecast: what steps and outputs are expected to take.

    Attributes:
        work: what is left to compute of the waiting ones, and whom they wait for.
        held: requests that wait apart from the queue, by number: policies do not see them.
        stop_ids: every token id that ends a live request -> how many of them.
    """

    def __init__(
        self, limits: StepLimits, policy: Policy, kv: KVManager, forecast: Forecast
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.forecast = forecast
        self.policy = policy
        self.tenants = forecast.tenants
        measure = None if policy.measure is None else self._figures_of
        self.waiting = WaitingQueue(self.place_of, measure, self._has_due, self.tenants)
        self.max_wait = self._maximum_wait(policy)
        self.quotas = ClassQuotas()
        self._pinned: set[str] = set()
        self.rows = RowTable(limits.max_num_seqs, limits.page_size, kv.needs.num_groups)
        self.busy_until_s = 0.0
        self.num_added = 0
        self.num_with_targets = 0
        self.num_with_grammar = 0
        self.stop_ids: dict[int, int] = {}
        self.held: dict[int, LiveRequest] = {}
        self._by_id: dict[str, LiveRequest] = {}
        self.work = RemainingWork(kv, forecast, self.waiting.replace)

    def adopt(self, policy: Policy) -> None:
        """Goes on by another policy."""
        self.policy = policy
        self.max_wait = self._maximum_wait(policy)
        measure = None if policy.measure is None else self._figures_of
        self.waiting.reorder(measure, self._has_due)
        if policy.max_wait_s is not None:
            for entry in self.waiting:
                if not entry.is_pinned:
                    self.max_wait.began(entry)

    @property
    def _has_due(self) -> Callable[[Request], bool] | None:
        return None if self.policy.turns is None else self.policy.turns.has_due

    def _maximum_wait(self, policy: Policy) -> MaximumWait:
        max_wait_s = math.inf if policy.max_wait_s is None else policy.max_wait_s
        return MaximumWait(max_wait_s, self.get)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Live requests in order of acceptance."""
        return iter(self._by_id.values())

    def get(self, request_id: str) -> LiveRequest | None:
        """The live request with this id, or None."""
        return self._by_id.get(request_id)

    def entry(self, request: Request) -> LiveRequest:
        """The record of a live request."""
        return self._by_id[request.request_id]

    def find(self, request: Request) -> LiveRequest | None:
        """The record of a request, or None if it has ended."""
        return self._by_id.get(request.request_id)

    @property
    def has_places(self) -> bool:
        """Whether the policy gives requests a place, so that the queue is in its order."""
        return self.policy.place is not None

    def place_of(self, entry: LiveRequest) -> Place:
        """Where an entry stands by the policy; before all others once it was pinned, behind them
        while it is demoted. Where others wait for what it computes, no later than they. What its
        tenant was served is left out."""
        policy = self.policy
        place: Place
        if entry.is_pinned:
            place = (-math.inf, entry.request.arrival_s)
        else:
            place = () if policy.place is None else policy.place(entry.request, self.forecast)
            if entry.is_demoted:
                place = (math.inf, *place)
        if entry.followers:
            return min(place, min(other.place for other in entry.followers.values()))
        return place

    @property
    def takes_turns(self) -> bool:
        """Whether tenants take turns: several have live requests, and the policy minds."""
        return self.policy.turns is not None and self.tenants.num_live > 1

    @property
    def lead_token_s(self) -> float:
        """Seconds by which a request comes later for each token that its tenant is ahead."""
        return 0.0 if self.policy.turns is None else self.policy.turns.token_s(self.forecast)

    def _lead(self, request: Request) -> float:
        """Tokens by which a live request's tenant is ahead; 0 where no turns are taken."""
        return self.waiting.lines.lead(self.entry(request).tenant) if self.takes_turns else 0.0

    def _figures_of(self, entry: LiveRequest) -> WaitingFigures:
        assert self.policy.measure is not None
        figures = self.policy.measure(entry.request, entry.place, self.forecast)
        # Who was given up or must come first is not given up again.
        is_settled = entry.is_demoted or entry.is_pinned
        if not is_settled:
            return figures
        demoted_due_s = math.inf if entry.is_pinned else figures.due_s
        return figures._replace(due_s=math.inf, demoted_due_s=demoted_due_s)

    def snapshot(
        self,
        now_s: float,
        decoding: Rows = NO_ROWS,
    ) -> Snapshot:
        """The state as policies see it.

        Args:
            decoding: rows that decode in the step being planned, as far as they are known.
        """
        snapshot = Snapshot(
            now_s=now_s,
            waiting=self.waiting.requests,
            running=self.rows.requests,
            num_available_pages=0,
            limits=self.limits,
            forecast=self.forecast,
            rows=self.rows,
            waiting_columns=self.waiting.columns,
            pinned=self._pinned,
            lead=self._lead,
        )
        self.renew(snapshot)
        snapshot.decoding = decoding
        return snapshot

    def renew(self, snapshot: Snapshot) -> None:
        """Makes a snapshot, but for its decode rows, what `snapshot` would return now: most of it
        is a view of the state."""
        snapshot.starts_s = max(snapshot.now_s, self.busy_until_s)
        snapshot.prefilling, snapshot.demoted = self._prompts()
        snapshot.num_available_pages = self.kv.pool.num_available
        snapshot.num_free_rows = len(self.rows.free_slots)
        snapshot.num_awaiting = self.work.num_awaiting

    def _prompts(self) -> tuple[Sequence[Request], Sequence[Request]]:
        """Running requests whose prompts are not computed yet: all but demoted ones, and those."""
        if not self.rows.num_prefilling:
            return (), ()
        prompts = self.rows.prefilling
        return (
            [entry.request for entry in prompts if not entry.is_behind],
            [entry.request for entry in prompts if entry.is_behind],
        )

    def carry_over(self, old: RequestTable) -> list[LiveRequest]:
        """Takes in the live requests of a table that cannot be trusted, as waiting ones.

        Returns:
            Their new records.
        """
        for name in ("num_added", "busy_until_s", "quotas"):
            setattr(self, name, getattr(old, name))
        entries = []
        for before in old._by_id.values():
            request = before.request
            request.status, request.slot = RequestStatus.WAITING, None
            request.counts = no_counts()
            entry = LiveRequest(
                request=request,
                number=before.number,
                pages=self.kv.open(request),
                num_scored_prompt_tokens=before.num_scored_prompt_tokens,
                is_pinned=before.is_pinned,
                is_demoted=before.is_demoted,
                tenant=before.tenant,
            )
            entry.ready_position = before.ready_position
            self._enter(entry)
            if entry.is_pinned:
                self._pinned.add(request.request_id)
            self._wait(entry, before.waiting_since_s)
            entries.append(entry)
        return entries

    def accept(self, request: Request, pages: SequencePages | None = None) -> LiveRequest:
        """Lets a new request wait, whose id no other has.

        Args:
            pages: its own, if they were opened already.
        """
        assert request.request_id not in self._by_id, request.request_id
        pages = self.kv.open(request) if pages is None else pages
        tenant = self.tenants.enter(request.tenant)
        entry = LiveRequest(request=request, number=self.num_added, pages=pages, tenant=tenant)
        self.num_added += 1
        self._enter(entry)
        self._wait(entry, request.arrival_s)
        return entry

    def _enter(self, entry: LiveRequest) -> None:
        self._by_id[entry.request.request_id] = entry
        for token_id in entry.stop_ids:
            self.stop_ids[token_id] = self.stop_ids.get(token_id, 0) + 1
        self.num_with_targets += has_target(entry.request)
        self.num_with_grammar += entry.request.has_grammar

    def pin_overdue(self, now_s: float) -> None:
        """Sends those to the front of the queue who have waited their longest."""
        for entry in self.max_wait.overdue(now_s):
            if entry.number in self.held:
                entry.is_pinned = True  # it comes to the front when it comes back
            else:
                self.waiting.pin(entry)
            self._pinned.add(entry.request.request_id)

    def hold(self, entry: LiveRequest) -> None:
        """Takes a waiting request out of the queue, until `free`."""
        self.waiting.remove(entry)
        self.work.leave(entry)
        self.held[entry.number] = entry

    def free(self, entry: LiveRequest) -> None:
        """Puts a held request back in its place."""
        del self.held[entry.number]
        self.work.enter(entry)
        self.waiting.insert(entry)

    def demote(self, entry: LiveRequest) -> None:
        """Serves a request only when no other waits, from now on."""
        if entry.request.slot is not None:
            entry.is_demoted = True
            return
        self._requeue(entry, is_demoted=True)

    def promote(self, entry: LiveRequest) -> None:
        """Gives a request that was demoted the place that it asked for."""
        if entry.request.slot is not None:
            entry.is_demoted = False
        else:
            self._requeue(entry, is_demoted=False)

    def _requeue(self, entry: LiveRequest, *, is_demoted: bool) -> None:
        self.work.leave(entry)  # it may be long before it computes what others count on
        self.waiting.remove(entry)
        entry.is_demoted = is_demoted
        self.work.enter(entry)
        self.waiting.insert(entry)

    def _wait(self, entry: LiveRequest, since_s: float) -> None:
        entry.waiting_since_s = since_s
        if entry.is_demoted and was_in_time(entry.request):
            entry.is_demoted = False
        self.work.enter(entry)
        lines = self.waiting.lines
        if not lines.has(entry.tenant):
            self.tenants.begin_to_wait(entry.tenant, lines.least_served())
        self.waiting.insert(entry)
        if self.max_wait.max_wait_s < math.inf and not entry.is_pinned:
            self.max_wait.began(entry)

    def admit(self, entry: LiveRequest, num_known: int, matched: PrefixMatch) -> None:
        """Gives a waiting request a free slot, and pages for all its known tokens. `begin_to_run`
        must follow.

        Args:
            num_known: how many those are.
            matched: cached pages it begins with.
        """
        request, kv = entry.request, self.kv
        num_cached = len(matched) * kv.page_size
        self.waiting.remove(entry)
        kv.admit(entry.pages, matched, num_known)
        self.rows.seat(entry)
        entry.prefill_end = num_known
        entry.num_committed_tokens = num_cached
        request.counts[COMPUTED] = num_cached
        request.num_reusable_tokens = 0
        if entry.leaders or entry.is_stale or entry.computes_at != len(matched):
            self.work.seat(entry, len(matched))
        if request.metrics.first_scheduled_s is None:
            # At once: who comes next may depend on what each tenant was served.
            self.tenants.serve(entry.tenant, num_known - num_cached, 0)

    def begin_to_run(self, entry: LiveRequest, admitted_s: float) -> None:
        """A request that was admitted is among the running ones."""
        request = entry.request
        self.work.forget(entry)
        if request.metrics.first_scheduled_s is None:
            request.metrics.first_scheduled_s = admitted_s
            request.num_cached_tokens = num_cached = entry.num_committed_tokens
            self.kv.count_query(entry.pages, entry.prefill_end, num_cached)
        self.rows.enter(entry)

    def unblock(self, entry: LiveRequest, num_tokens: int) -> None:
        """Lets a request go on that was blocked on its grammar, from so many known tokens."""
        entry.ready_position = max(entry.ready_position, num_tokens - 1)
        if entry.request.slot is not None:
            self.rows.ready_position[entry.request.slot] = entry.ready_position

    def preempt(self, entry: LiveRequest, now_s: float) -> None:
        """Takes slot and pages from a running request; it waits where it stood before.

        Tokens that dispatched steps still compute for it stay valid.
        """
        request = entry.request
        self._release(entry)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.metrics.num_preemptions += 1
        self._wait(entry, now_s)

    def end(
        self,
        entry: LiveRequest,
        status: RequestStatus,
        now_s: float,
        *,
        stop_reason: int | str | None = None,
        error: Exception | None = None,
    ) -> None:
        """The one terminal event of a live request."""
        assert entry.is_live, entry.request.request_id
        assert status.is_finished, status
        request = entry.request
        if request.slot is not None:
            self._release(entry)
        elif self.held.pop(entry.number, None) is None:
            self.waiting.remove(entry)
            self.work.leave(entry)
        if entry.pages.is_on_host:
            self.kv.drop_host_copy(entry.pages)
        del self._by_id[request.request_id]
        for token_id in entry.stop_ids:
            if self.stop_ids[token_id] == 1:
                del self.stop_ids[token_id]
            else:
                self.stop_ids[token_id] -= 1
        self.tenants.leave(request.tenant)
        self.num_with_targets -= has_target(request)
        self.num_with_grammar -= request.has_grammar
        self._pinned.discard(request.request_id)
        entry.is_live = False
        request.status = status
        request.stop_reason = stop_reason
        request.error = error
        request.metrics.finished_s = now_s

    def _release(self, entry: LiveRequest) -> None:
        """Takes slot and pages; full pages stay findable.

        Pages of the prompt were made findable as they were computed. Pages of the output are made
        so only now: hardly anybody asks for them sooner, and hashing them together is cheaper.
        """
        self.work.leave(entry)
        num_written = entry.num_committed_tokens
        if num_written == entry.prefill_end:
            num_written = entry.request.num_tokens - 1  # the newest token was never an input
        self.kv.register_full_pages(entry.pages, num_written)
        self.kv.release(entry.pages)
        self.rows.leave(entry)

    def check_integrity(self, host_in_transfer: Iterable[int] = ()) -> None:
        """Asserts that every live request is in one place and every page and slot accounted for.

        Args:
            host_in_transfer: host pages that belong to a transfer and no sequence.
        """
        self.waiting.check_integrity()
        self.rows.check_integrity()
        self.kv.check_integrity((entry.pages for entry in self), host_in_transfer)
        self.work.check_integrity(self)
        numbers = [entry.number for entry in self.waiting]
        numbers += [*self.held, *(entry.number for entry in self.rows)]
        assert sorted(numbers) == [entry.number for entry in self]
        assert self.num_with_grammar == sum(entry.request.has_grammar for entry in self)
        for entry in (*self.waiting, *self.held.values()):
            request = entry.request
            assert entry.is_live
            assert request.status is RequestStatus.WAITING
            assert request.slot is None
            assert not entry.pages.page_ids
            assert request.num_computed_tokens == 0
        for entry in self.rows:
            num_places = entry.pages.num_filled * self.kv.page_size
            assert entry.request.num_computed_tokens <= num_places
