"""The scheduler: which tokens to compute next, and what became of them.

`plan` and `commit` are the only doors to a step. Both are deterministic in the state, their
arguments and `now_s`; nothing here asks the machine for the time or touches a tensor.

Steps overlap: plan N+1 is made before step N's result is known. So a plan moves a request's host
state ahead of the device (`num_computed_tokens`, `num_inflight_tokens`), as if no row stopped
early. For a row that lives on this is exact, as such a row emits just the tokens it was planned
to; a row that did stop is ended by `commit`, and what later steps planned for it comes back empty
and is dropped. A result finds its request by the plan's row, never by slot: the slot may have a
new holder by then.

The file is long because it is the whole surface: every way in which the state changes can be read
together here. What a step decides is in `planner.py` and below.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Sequence

from octavo.engine.errors import DeadlineExceededError, InvalidConfigError
from octavo.engine.kv.cache_events import CacheEvents
from octavo.engine.kv.kv_manager import KVManager
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.request import Priority, Request, RequestStatus
from octavo.engine.scheduler.committer import Committer, News
from octavo.engine.scheduler.fairness import TenantCounters
from octavo.engine.scheduler.feasibility import check_can_ever_fit
from octavo.engine.scheduler.forced_tokens import Unblocked, append_forced
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.length_estimator import LengthEstimator
from octavo.engine.scheduler.load import (
    SchedulerLoad,
    measure_load,
    note_prediction,
    predict_ttft_s,
)
from octavo.engine.scheduler.pending_updates import PendingUpdates
from octavo.engine.scheduler.plan_builder import Dispatched, PlanBuilder, TraceEvent, Traces
from octavo.engine.scheduler.planner import Planner
from octavo.engine.scheduler.policies import get_policy
from octavo.engine.scheduler.policy import Policy
from octavo.engine.scheduler.refusals import Refusals
from octavo.engine.scheduler.request_table import RequestTable
from octavo.engine.scheduler.standing import Standing, standing_of
from octavo.engine.scheduler.step_plan import StepLimits, StepPlan, StepResult
from octavo.engine.scheduler.step_time_model import StepTimeModel
from octavo.engine.scheduler.transfers import Transfers

logger = logging.getLogger(__name__)


class Scheduler:
    """Continuous batching over a paged KV pool.

    Every plan holds to three budgets: tokens ≤ `max_num_batched_tokens`, rows ≤ `max_num_seqs`,
    pages ≤ the pool (for admission, less the watermark). See `Planner` for how.

    Args:
        limits: what the compiled steps can take.
        policy: a policy or its name.
        enable_prefix_caching: share and keep full pages.
        enable_chunked_prefill: split prompts over steps.
        watermark: share of the pool that admission leaves free for running rows to grow into.
        num_decode_steps: most decode iterations in one dispatch.
        step_time: what steps take, to begin with; None for a guess. It goes on learning.
        lengths: how long answers are, to begin with; None for a guess. It goes on learning.
        page_copy_s: seconds to copy a page to or from the host, to begin with.
        explain: give each plan its reasons, and each request a trace.

    Raises:
        InvalidConfigError: limits that contradict each other, or an unknown policy.
    """

    def __init__(
        self,
        limits: StepLimits,
        *,
        policy: str | Policy = "auto",
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        watermark: float = 0.01,
        num_decode_steps: int = 1,
        step_time: StepTimeModel | None = None,
        lengths: LengthEstimator | None = None,
        page_copy_s: float = 2e-5,
        explain: bool = False,
    ) -> None:
        if limits.max_num_batched_tokens < limits.max_num_seqs:
            raise InvalidConfigError(
                "max_num_batched_tokens",
                limits.max_num_batched_tokens,
                f"at least max_num_seqs ({limits.max_num_seqs})",
            )
        self.limits = limits
        self.policy = get_policy(policy) if isinstance(policy, str) else policy
        self._without_targets = self.policy
        self._enable_chunked_prefill = enable_chunked_prefill
        has_snapshots = not limits.has_states or limits.num_snapshots > 0
        self._enable_prefix_caching = enable_prefix_caching and has_snapshots
        if enable_prefix_caching and not has_snapshots:
            logger.info("prefix caching is off: recurrent layers, and no place for snapshots")
        self._watermark = watermark
        self._max_steps = min(limits.max_num_steps, num_decode_steps)
        self.forecast = Forecast(
            limits=limits,
            step_time=step_time
            or StepTimeModel.of(limits.token_edges, has_dear_rows=limits.has_dear_rows),
            num_steps_to_trust=8 if step_time is None else 0,
            lengths=lengths or LengthEstimator(limits.max_model_len),
            uses_declared_lengths=self.policy.uses_declared_lengths,
            page_copy_s=page_copy_s,
        )
        self._tenants = TenantCounters()
        self.refusals = Refusals(self.forecast)
        self._builder = PlanBuilder(explains=explain)
        self._traces = Traces()
        self._cache_events: CacheEvents | None = None
        self._make_books()
        self._dispatched: deque[Dispatched] = deque()
        self._last_s = self._last_commit_s = 0.0
        self.num_rebuilds = 0
        """Times that the books were in such disorder that they were made anew."""
        self.appends_all_forced = False
        """Appends forced tokens whatever the steps take: for tests of what becomes of them."""

    def _make_books(self) -> None:
        """Makes empty books: the KV manager, the request table, and what changes them."""
        limits = self.limits
        self._kv = KVManager(
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            enable_prefix_caching=self._enable_prefix_caching,
            num_host_pages=limits.num_host_pages,
            run_pages=limits.run_pages,
            windows=limits.windows,
            chunk_tokens=limits.max_num_batched_tokens,
            num_snapshots=limits.num_snapshots if self._enable_prefix_caching else 0,
            snapshot_tokens=limits.snapshot_tokens,
        )
        if self._cache_events is not None:
            self._kv.tell(self._cache_events)
            self._cache_events.cleared()
        self._transfers = Transfers(self._kv, self.forecast, self._builder)
        self._unapplied = table = RequestTable(
            limits, self.policy, self._kv, self.forecast, self._tenants
        )
        self._pending = PendingUpdates(table, self._builder.counts)
        self._committer = Committer(table)
        self._planner = Planner(
            table,
            self._pending,
            self._transfers,
            self._builder,
            self.refusals,
            enable_chunked_prefill=self._enable_chunked_prefill,
            watermark_pages=int(self._watermark * self._kv.pool.num_usable),
            max_steps=self._max_steps,
        )

    @property
    def _table(self) -> RequestTable:
        """The request table, with the newest plan applied. Code that decides or changes anything
        uses this property; code that only reads figures may use `_unapplied`."""
        self._pending.apply()
        return self._unapplied

    # Requests come and go.

    def add(self, request: Request, now_s: float) -> None:
        """Accepts a new request; it waits from now on.

        Raises:
            InvalidRequestError: it could not be finished even alone.
            DeadlineExceededError: its deadline has passed.
            OverloadedError: it could not be in time at the load of this moment.
            UnattainableTargetError: nor could it be on an idle machine.
        """
        assert request.status is RequestStatus.WAITING, request.status
        table = self._table
        check_can_ever_fit(
            request, self.limits, enable_chunked_prefill=self._enable_chunked_prefill
        )
        if request.deadline_s is not None and request.deadline_s < now_s:
            raise _deadline_passed(request)
        is_resumed = bool(request.output_token_ids)
        if not is_resumed:
            self.forecast.door_s.observe(max(0.0, now_s - request.arrival_s))
        pages = self._kv.open(request)
        request.num_reusable_tokens = table.work.num_reusable(pages)
        if not is_resumed:  # else its reader was promised the rest by another engine
            num_computed = self._builder.counts.num_computed_tokens
            error = self.refusals.at_door(table, self.policy, request, num_computed, now_s)
            if error is not None:
                request.num_reusable_tokens = 0
                raise error
        entry = table.accept(request, pages)
        if not is_resumed:
            self.forecast.ttft_targets.observe(request.ttft_target_s or math.inf)
            note_prediction(table, self.forecast, entry, now_s)
        if table.is_restricted:
            table.hold(entry)

    def cancel(
        self,
        request_id: str,
        now_s: float,
        status: RequestStatus = RequestStatus.CANCELLED,
        error: Exception | None = None,
    ) -> Request | None:
        """Ends a live request, wherever it stands; None if there is none with this id.

        Its slot and pages are free from the next plan on; tokens that dispatched steps still
        compute for it are dropped at their commit.
        """
        table = self._table
        entry = table.live.get(request_id)
        if entry is None:
            return None
        table.end(entry, status, now_s, error=error)
        return entry.request

    def finish(
        self,
        request: Request,
        status: RequestStatus,
        stop_reason: int | str | None,
        now_s: float,
    ) -> bool:
        """Ends a request for a reason found outside, such as a stop string in its text.

        Returns:
            Whether it was live, so that this is its one terminal event.
        """
        table = self._table
        entry = table.live.get(request.request_id)
        if entry is None:
            return False
        if status is RequestStatus.STOPPED:
            self.forecast.lengths.observe(request)
        table.end(entry, status, now_s, stop_reason=stop_reason)
        return True

    def take_ended(self) -> list[Request]:
        """Requests that `plan` ended (rejected for lack of capacity), each reported once."""
        ended, self._builder.ended = self._builder.ended, []
        return ended

    def complete_transfer(
        self, transfer_id: int, ok: bool, now_s: float, seconds: float = 0.0
    ) -> None:
        """Takes in the end of a plan's page copy.

        Args:
            ok: whether the pages arrived; if not, the sequence is computed again.
            seconds: what the copy itself took, if that was measured.
        """
        table = self._table
        arrived = self._transfers.complete(transfer_id, ok, now_s, seconds)
        if arrived is None:
            return
        entry, num_tokens = arrived
        if num_tokens:
            entry.request.num_computed_tokens = entry.num_committed_tokens = num_tokens
            table.rows.end_arrival(entry)
        else:
            self._planner.preemption.preempt(entry, now_s)

    def unblock(self, request_id: str, num_tokens: int) -> None:
        """Unblocks a request: the mask of its next token is ready.

        A request with a grammar (`Request.has_grammar`) is blocked by each token that is committed,
        until the mask of the next one is ready. A new request is not blocked.

        Args:
            num_tokens: the prompt and output tokens that the next one follows.
        """
        table = self._table
        entry = table.live.get(request_id)
        if entry is not None:
            table.unblock(entry, num_tokens)

    def append_forced(self, offers: Sequence[Unblocked], now_s: float) -> News:
        """Appends tokens that requests' grammars force, where that saves time.

        A running request computes them as a chunk before it decodes on; a waiting one as a part of
        what it computes anyway. Only `unblock`ed requests have any. A request without news goes on
        as if no token were known: each of its tokens comes from a step.

        Returns:
            News of the requests that have their tokens; some end by them.
        """
        always = self.appends_all_forced
        return append_forced(self._table, self._committer, offers, now_s, always=always)

    def expire(self, now_s: float) -> list[Request]:
        """Ends the live requests whose deadline lies before `now_s`, as failed; returns them."""
        table = self._table
        expired: list[Request] = []
        while (entry := table.live.pop_late(now_s)) is not None:
            error = _deadline_passed(entry.request)
            table.end(entry, RequestStatus.FAILED, now_s, error=error)
            expired.append(entry.request)
        return expired

    @property
    def transfers(self) -> Transfers:
        """Page copies, and the prefix pages that other engines want or give."""
        self._pending.apply()
        return self._transfers

    def page_names(self, request_id: str) -> list[PageHash]:
        """Names of the full pages of a request's tokens; none if it is not live. All of them that
        are computed can be found from now on."""
        table = self._table
        entry = table.live.get(request_id)
        if entry is None or not self._transfers.can_exchange:
            return []
        if entry.request.slot is not None and not entry.pages.arriving:
            table.make_findable(entry)
        table.kv.name_known(entry.pages)
        return [*entry.pages.hashes]

    # Steps.

    def plan(self, now_s: float) -> StepPlan | None:
        """Decides the next step; from `apply_plan` on the host state is as if it had run.

        Returns:
            The plan, which must end in `commit` or `recover`; None if there is nothing to compute
            until a dispatched step is committed or a request arrives.
        """
        self._last_s = now_s
        self._pending.apply()
        if self._without_targets.with_targets is not None:
            self._follow_targets(self._without_targets.with_targets)
        dispatched = self._planner.plan(now_s)
        if dispatched is None:
            return None
        dispatched.overlaps = len(self._dispatched) > 0
        self._dispatched.append(dispatched)
        if dispatched.plan.reasons:
            self._traces.note(dispatched.plan.reasons, now_s)
        return dispatched.plan

    def apply_plan(self) -> None:
        """Applies the newest plan: moves the host state ahead as if the plan had run, forgets what
        evicted pages held, and more.

        Nothing in the plan depends on it. The engine calls it once the plan is dispatched, so that
        it runs while the device works. Otherwise the next call of a method here begins with it.
        """
        self._pending.apply()

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> News:
        """Takes in the result of the oldest dispatched plan.

        Appends tokens, ends requests that stopped or reached their limit, and makes full pages
        findable. Rows of requests that ended meanwhile are dropped.

        Returns:
            News of each request that has any: first of the requests that merely go on, in the order
            of the plan's rows, then of the others in that order.
        """
        table = self._table
        dispatched = self._dispatched[0]
        assert dispatched.plan is plan, "results are committed in dispatch order"
        num_rows = plan.num_rows
        assert len(result.rows) == num_rows, (len(result.rows), num_rows)
        self._dispatched.popleft()
        table.busy_until_s = now_s + sum(
            self.forecast.step_time.predict_s(later.features) * later.plan.num_steps
            for later in self._dispatched
        )
        if result.duration_s > 0 and num_rows:
            self._observe(dispatched, result.duration_s, now_s)
        self._last_commit_s = now_s
        news = self._committer.take(dispatched, result, now_s)
        if len(self.refusals.probes):
            self.refusals.probes.look()
        return news

    def _observe(self, dispatched: Dispatched, duration_s: float, now_s: float) -> None:
        """Learns what a step took on the device, and what it took beside that."""
        begun_s = max(dispatched.now_s, self._last_commit_s)
        host_s = self.forecast.gap_s if dispatched.overlaps else self.forecast.host_s
        host_s.observe(max(0.0, now_s - begun_s - duration_s))
        plan = dispatched.plan
        self.forecast.observe_step(dispatched.features, duration_s, plan.num_steps, now_s)

    def take_back(self, plan: StepPlan) -> News:
        """Undoes a `commit` that failed, however far it came: requests that go on lose the tokens
        that it gave them. `recover` must follow, and the tokens are computed again.

        Returns:
            News of the requests that the commit ended, which nothing else reports.
        """
        return self._committer.take_back(plan)

    def recover(self, now_s: float, broken: Collection[str] = ()) -> None:
        """Starts over after a failed step: no plan is on its way any more, and the device holds
        nothing. Running requests wait, to be computed again from the tokens that they have.

        If a failure of the scheduler itself left its books in disorder, they are made anew from the
        list of live requests. What the host tier holds is lost then, too.

        Args:
            broken: ids of requests whose KV is not to be trusted, on the host either.
        """
        self._last_s = now_s
        computed = [request for step in self._dispatched for request in step.requests]
        self._dispatched.clear()
        self._builder.forget_copies()
        try:
            table = self._table
            for request in (*computed, *self.live_requests):
                request.num_inflight_steps = request.num_inflight_tokens = 0
            self._transfers.abandon(now_s)
            for entry in list(table.rows):
                self._planner.preemption.preempt(entry, now_s)
            self._kv.forget_prefixes()
            lost = [table.live.get(request_id) for request_id in broken]
            # What a failed step computed may be on the host already, and is in no request's sums.
            lost += [entry for entry in table.live if entry.pages.host_pages and entry.lacks_sums]
            for entry in filter(None, lost):
                self._kv.drop_host_copy(entry.pages)
                table.work.changed(entry)
            self.check_integrity()
        except Exception:
            logger.exception("the scheduler's books do not balance: they are made anew")
            self._rebuild()
        self._unapplied.busy_until_s = now_s

    def _rebuild(self) -> None:
        old, transfers, cache = self._unapplied, self._transfers, self._kv.cache
        self._make_books()
        self._table.carry_over(old)
        self._transfers.carry_over(transfers)
        self._kv.cache.num_queried_tokens = cache.num_queried_tokens
        self._kv.cache.num_hit_tokens = cache.num_hit_tokens
        self.num_rebuilds += 1

    @property
    def can_tell_cache_events(self) -> bool:
        """Whether the prefix cache can be followed: a page in it implies that the pages before it
        are there, too."""
        return self._enable_prefix_caching and self._kv.serves_each_page and self._kv.needs.is_plain

    def tell_cache_events(self, events: CacheEvents) -> None:
        """Reports pages that come into the prefix cache and leave it, from now on. Only where
        `can_tell_cache_events`."""
        self._cache_events = events
        self._kv.tell(events)

    def flush_prefixes(self) -> tuple[int, int]:
        """Forgets every cached prefix; (device pages, host pages) that come free by it.

        Host pages that are being read stay until they have been.
        """
        kv = self._table.kv
        num_pages, num_host_pages = kv.pool.num_cached, kv.host.num_cached
        kv.forget_prefixes()
        kv.host.forget_prefixes()
        return num_pages, num_host_pages - kv.host.num_cached

    def only(self, request_ids: Collection[str] | None) -> None:
        """From now on plans hold no other waiting requests than these, nor any that come; running
        ones go on. None ends it."""
        self._table.only(request_ids)

    def _follow_targets(self, with_targets: Policy) -> None:
        """Changes over to the other policy when the first request with a target has come, and back
        when the last one has ended."""
        policy = with_targets if self._table.live.num_with_targets else self._without_targets
        if policy is not self.policy:
            self.policy = policy
            self._table.places.adopt(policy)

    # Figures.

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return len(self._unapplied.live) > 0

    @property
    def has_work(self) -> bool:
        """Whether any request is live or any dispatched step awaits its commit."""
        return len(self._unapplied.live) > 0 or len(self._dispatched) > 0

    @property
    def num_running(self) -> int:
        return len(self._unapplied.rows)

    @property
    def num_waiting(self) -> int:
        return len(self._unapplied.waiting) + len(self._unapplied.held)

    def get(self, request_id: str) -> Request | None:
        """The live request with this id, or None."""
        entry = self._unapplied.live.get(request_id)
        return None if entry is None else entry.request

    @property
    def num_transfers(self) -> int:
        """Page copies that have not been reported to have ended."""
        return len(self._transfers)

    @property
    def live_requests(self) -> list[Request]:
        """Every live request, in order of acceptance."""
        return [entry.request for entry in self._unapplied.live]

    def load(self, now_s: float | None = None) -> SchedulerLoad:
        """Figures of this moment (of the newest plan by default), and counts since the start.

        Only reads, so that any thread may ask. Pages that `apply_plan` has not handed out yet do
        not count as held by rows.
        """
        return measure_load(
            self._unapplied,
            self._pending.newcomers,
            self._builder.counts,
            self.forecast,
            self._last_s if now_s is None else now_s,
        )

    def standing(self, now_s: float) -> Standing:
        """A few figures of this moment, for routers: a tenth of what `load` costs. Only reads."""
        return standing_of(self._unapplied, self.forecast, now_s)

    def predict_ttft_s(
        self,
        num_prompt_tokens: int,
        now_s: float,
        priority: Priority = Priority.NORMAL,
        *,
        num_cached_tokens: int = 0,
    ) -> float:
        """Seconds until a new request of this size and class would have its first token.

        Only reads, as `load` does.

        Args:
            num_cached_tokens: of the prompt's tokens, those that need not be computed.
        """
        num_missing = max(1, num_prompt_tokens - num_cached_tokens)
        return predict_ttft_s(self._unapplied, self.forecast, num_missing, priority, now_s)

    def num_cached_tokens(
        self, prompt_token_ids: Sequence[int], *, tenant: str = "", cache_salt: str = ""
    ) -> int:
        """Tokens of a prompt that would be found in the prefix cache now. Only reads."""
        return self._kv.lookup.num_cached_tokens(
            prompt_token_ids, tenant=tenant, cache_salt=cache_salt
        )

    def explain(self, wanted: bool) -> None:
        """Turns the reasons of plans and the traces of requests on or off."""
        self._builder.explains = wanted

    def trace(self, request_id: str) -> tuple[TraceEvent, ...]:
        """What was decided about a request and when, oldest first; empty without `explain`.

        Kept for some time after its end.
        """
        return self._traces.of(request_id)

    def check_integrity(self) -> None:
        """Asserts every invariant that spans the parts; cheap enough after every test."""
        table = self._table
        table.check_integrity(self._transfers.owned_host_pages())
        num_steps: dict[Request, int] = {}
        num_tokens: dict[Request, int] = {}
        for dispatched in self._dispatched:
            counts = dispatched.plan.decode_rows.max_new_tokens.tolist()
            counts += [int(chunk.samples) for chunk in dispatched.plan.prefill_rows]
            for request, count in zip(dispatched.requests, counts, strict=True):
                num_steps[request] = num_steps.get(request, 0) + 1
                num_tokens[request] = num_tokens.get(request, 0) + count
        for entry in table.live:
            request = entry.request
            assert request.num_inflight_steps == num_steps.get(request, 0)
            assert request.num_inflight_tokens == num_tokens.get(request, 0)
            expected = len(request.output_token_ids) + request.num_inflight_tokens
            assert expected <= request.max_tokens
        for entry in table.rows:
            request = entry.request
            if request.num_computed_tokens >= entry.prefill_end:
                expected = request.num_tokens + request.num_inflight_tokens - 1
                assert request.num_computed_tokens == expected, request


def _deadline_passed(request: Request) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"request {request.request_id} passed its deadline ({request.deadline_s:.3f} s on the "
        f"engine's clock) with {len(request.output_token_ids)} tokens generated"
    )
