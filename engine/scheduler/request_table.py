"""Every live request and every transition it can make: accepted, admitted, preempted, ended.

It is one long module because each transition keeps the same queue, rows, columns, pages and counts
in step; what each of them is has a module of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.kv.prefix_lookup import PrefixMatch
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.request import COMPUTED, Request, RequestStatus, no_counts
from octavo.engine.scheduler.deadlines import was_in_time
from octavo.engine.scheduler.fairness import ClassQuotas, TenantCounters
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.live_request import LiveRequest, LiveRequests
from octavo.engine.scheduler.policy import Policy, Snapshot
from octavo.engine.scheduler.remaining_work import RemainingWork
from octavo.engine.scheduler.row_table import RowTable
from octavo.engine.scheduler.rows import NO_ROWS, Rows
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.scheduler.waiting_queue import Places


class RequestTable:
    """The state that plans are made from. A live request is either waiting or running.

    Slots and pages return to their pools at once, even while a dispatched step still names them:
    the device runs steps in dispatch order, so the next holder's data comes after that step.

    Args:
        limits: what a step can take.
        policy: gives waiting requests their places.
        kv: owner of the pages.
        forecast: what steps and outputs are expected to take.
        tenants: what each tenant was served.

    Attributes:
        live: the register of live requests.
        places: where each of them stands, and the policy that says so. Plans ask for it there.
        waiting: the requests that wait, in their places.
        held: requests that wait apart from the queue, by number: policies do not see them.
        rows: the requests that run, by slot.
        work: what is left to compute of the waiting ones, and whom they wait for.
        quotas: what each class was served.
        busy_until_s: when the device is expected to be done with what was dispatched.
    """

    def __init__(
        self,
        limits: StepLimits,
        policy: Policy,
        kv: KVManager,
        forecast: Forecast,
        tenants: TenantCounters,
    ) -> None:
        self.limits = limits
        self.kv = kv
        self.forecast = forecast
        self.tenants = tenants
        self.live = LiveRequests()
        self.places = Places(policy, forecast, tenants, self.live.get)
        self.waiting = self.places.queue
        self.held: dict[int, LiveRequest] = {}
        self._only: frozenset[str] | None = None
        self.rows = RowTable(limits.max_num_seqs, limits.page_size, kv.needs.num_groups)
        self.work = RemainingWork(kv, forecast, self.waiting.replace)
        self.quotas = ClassQuotas()
        self.busy_until_s = 0.0

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
            pinned=self.places.pinned,
            lead=self._lead,
        )
        self.renew(snapshot)
        snapshot.decoding = decoding
        return snapshot

    def _lead(self, request: Request) -> float:
        return self.places.lead(self.live.entry(request))

    def renew(self, snapshot: Snapshot) -> None:
        """Makes a snapshot, but for its decode rows, what `snapshot` would return now: most of it
        is a view of the state."""
        snapshot.starts_s = max(snapshot.now_s, self.busy_until_s)
        snapshot.prefilling, snapshot.demoted = self._prompts()
        snapshot.num_available_pages = self.kv.pool.num_available
        snapshot.num_awaiting = self.work.num_awaiting

    def _prompts(self) -> tuple[Sequence[Request], Sequence[Request]]:
        """Running requests whose prompts are not computed yet, and the demoted ones apart."""
        if not self.rows.num_prefilling:
            return (), ()
        prompts = self.rows.prefilling
        return (
            [entry.request for entry in prompts if not entry.is_behind],
            [entry.request for entry in prompts if entry.is_behind],
        )

    def carry_over(self, old: RequestTable) -> None:
        """Takes in the live requests of a table that cannot be trusted, as waiting ones."""
        self.live.num_added = old.live.num_added
        self.quotas, self.busy_until_s = old.quotas, old.busy_until_s
        for before in old.live:
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
            self.live.enter(entry)
            self._wait(entry, before.waiting_since_s)
        self._only = old._only
        self._hold_others()

    def accept(self, request: Request, pages: SequencePages | None = None) -> LiveRequest:
        """Lets a new request wait, whose id no other has.

        Args:
            pages: its own, if they were opened already.
        """
        pages = self.kv.open(request) if pages is None else pages
        tenant = self.tenants.enter(request.tenant)
        number, self.live.num_added = self.live.num_added, self.live.num_added + 1
        entry = LiveRequest(request=request, number=number, pages=pages, tenant=tenant)
        self.live.enter(entry)
        self._wait(entry, request.arrival_s)
        return entry

    def only(self, request_ids: Collection[str] | None) -> None:
        """Holds all waiting requests but these from now on, and puts these back in their places.
        None ends it."""
        self._only = None if request_ids is None else frozenset(request_ids)
        for entry in list(self.held.values()):
            if self._only is None or entry.request.request_id in self._only:
                del self.held[entry.number]
                self.work.enter(entry)
                self.waiting.insert(entry)
        self._hold_others()

    @property
    def is_restricted(self) -> bool:
        """Whether new requests are to be held."""
        return self._only is not None

    def hold(self, entry: LiveRequest) -> None:
        """Takes a waiting request out of the queue, until `only` puts it back."""
        self.waiting.remove(entry)
        self.work.leave(entry)
        self.held[entry.number] = entry

    def _hold_others(self) -> None:
        if self._only is not None:
            for entry in list(self.waiting):
                if entry.request.request_id not in self._only:
                    self.hold(entry)

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
        self.places.begin_to_wait(entry)

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
            # At once: which request comes next may depend on what each tenant was served.
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

    def prefill_again(self, entry: LiveRequest, num_new: int) -> None:
        """Tokens that no step has made are about to be appended to a request.

        A row that decoded has known tokens to compute again, for which it may lack pages. Its row
        state is set anew with them: the device has not counted them.
        """
        request = entry.request
        num_known = request.num_tokens + num_new
        if request.slot is not None:
            entry.num_committed_tokens = request.num_computed_tokens
            entry.prefill_end = num_known
            entry.is_placed = False
            self.rows.end_decode_for_prefill(entry)
        self.unblock(entry, num_known)

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
        self.live.leave(entry)
        self.tenants.leave(request.tenant)
        self.places.pinned.discard(request.request_id)
        request.status = status
        request.stop_reason = stop_reason
        request.error = error
        request.metrics.finished_s = now_s

    def make_findable(self, entry: LiveRequest) -> None:
        """Makes all full pages of a running request findable.

        Pages of the prompt were made so as they were computed. Pages of the output are when it
        ends, or is moved: hardly anybody asks for them sooner, and hashing them together is
        cheaper.
        """
        num_written = entry.num_committed_tokens
        if num_written == entry.prefill_end:
            num_written = entry.request.num_tokens - 1  # the newest token was never an input
        self.kv.register_full_pages(entry.pages, num_written)

    def _release(self, entry: LiveRequest) -> None:
        """Takes slot and pages; full pages stay findable."""
        self.work.leave(entry)
        self.make_findable(entry)
        self.kv.release(entry.pages)
        self.rows.leave(entry)

    def check_integrity(self, host_in_transfer: Iterable[int] = ()) -> None:
        """Asserts that every live request is in one place and every page and slot accounted for.

        Args:
            host_in_transfer: host pages that belong to a transfer and no sequence.
        """
        self.live.check_integrity()
        self.waiting.check_integrity()
        self.rows.check_integrity()
        self.kv.check_integrity((entry.pages for entry in self.live), host_in_transfer)
        self.work.check_integrity(self.live)
        numbers = [entry.number for entry in self.waiting]
        numbers += [*self.held, *(entry.number for entry in self.rows)]
        assert sorted(numbers) == [entry.number for entry in self.live]
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
