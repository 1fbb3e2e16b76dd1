"""The one loop everybody reads first: plan, dispatch, commit.

While step N runs, step N+1 is planned and dispatched; a row's next input token is read on the
device, so the host never waits for it. Then N's tokens are read and committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from octavo.engine.clock import Clock
from octavo.engine.errors import OctavoError
from octavo.engine.executor import StepExecutor
from octavo.engine.faults.recovery import Recovery
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.observability.observers import Observer, Observers
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler.committer import Committed, News
from octavo.engine.scheduler.forced_tokens import Unblocked
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import StepPlan
from octavo.engine.structured.masks import MaskReady, TokenMasks


class EngineCore:
    """Turns requests into tokens, a step at a time. Not thread-safe: one thread drives it.

    Args:
        scheduler: decides.
        executor: computes.
        clock: tells the time.
        overlap: keep one step in flight while the next is planned.
        survives_bugs: recover from exceptions of the scheduler, too, as from those of a step.
            Simulations and tests of the scheduler want to see them instead.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: StepExecutor,
        clock: Clock,
        *,
        overlap: bool = True,
        survives_bugs: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._max_in_flight = 2 if overlap else 1
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._survives_bugs = survives_bugs
        self._news = News()
        self.recovery = Recovery(scheduler, self._reset, clock)
        self.num_bugs = 0
        """Exceptions of the scheduler among the causes of recoveries."""
        self.host_s = 0.0
        """Seconds spent planning, packing, dispatching and committing, waiting not included."""
        self.waited_s = 0.0
        """Seconds spent waiting for the device."""
        self.masks: TokenMasks | None = None
        """Token masks of requests that a grammar constrains. None if structured output is off."""
        self._log: Observer | None = None
        self.num_turns = 0
        """Turns in which a step was dispatched or committed, or a copy ended."""

    @property
    def log(self) -> Observer | None:
        """The observer of everything that goes in and comes out. None if there is none."""
        return self._log

    @log.setter
    def log(self, observer: Observer | None) -> None:
        self._log = self.recovery.log = observer

    def observe(self, observer: Observer) -> None:
        """Tells an observer, too, from now on. The loop's thread calls it, or nobody yet."""
        self.log = Observers(*self._observers(), observer)

    def unobserve(self, observer: Observer) -> None:
        """Tells an observer no more."""
        others = [each for each in self._observers() if each is not observer]
        self.log = Observers(*others) if others else None

    def _observers(self) -> Sequence[Observer]:
        return () if self.log is None else getattr(self.log, "observers", (self.log,))

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._in_flight or len(self._news) or self.scheduler.has_unfinished)

    def add(self, request: Request) -> None:
        """Takes a request.

        Raises:
            InvalidRequestError: it can never be served.
            OverloadedError: not now; DeadlineExceededError: not any more.
            QuarantinedError: its prompt made steps fail a moment ago.
        """
        now_s = self._clock.now_s()
        self.recovery.quarantine.check(request, now_s)
        try:
            self.scheduler.add(request, now_s)
        except OctavoError as error:
            if self.log is not None:
                self.log.added(request, now_s, error)
            raise
        if self.log is not None:
            self.log.added(request, now_s, None)

    def withdraw(self, request_id: str) -> None:
        """Takes back a request that was just added; nobody is told."""
        now_s = self._clock.now_s()
        request = self.scheduler.cancel(request_id, now_s)
        if self.log is not None:
            status = RequestStatus.CANCELLED.value
            self.log.cancelled(request_id, status, request is not None, now_s)

    def cancel(
        self,
        request_id: str,
        status: RequestStatus = RequestStatus.CANCELLED,
        error: Exception | None = None,
    ) -> bool:
        """Ends a live request now; tokens its dispatched steps still compute are dropped.

        Its terminal event is among the next `step`'s news.

        Returns:
            Whether there was such a request.
        """
        now_s = self._clock.now_s()
        request = self.scheduler.cancel(request_id, now_s, status, error)
        if self.log is not None:
            self.log.cancelled(request_id, status.value, request is not None, now_s)
        if request is not None:
            self._news.items.append(_ended(request))
        return request is not None

    def page_names(self, request_id: str) -> list[PageHash]:
        """As `Scheduler.page_names`."""
        names = self.scheduler.page_names(request_id)
        if self.log is not None:
            self.log.pages_named(request_id, self._clock.now_s())
        return names

    def bring_to_host(self, names: Sequence[PageHash]) -> int | None:
        """As `Transfers.bring_to_host`."""
        now_s = self._clock.now_s()
        transfer_id = self.scheduler.transfers.bring_to_host(names, now_s)
        if self.log is not None:
            self.log.pages_wanted(names, transfer_id, now_s)
        return transfer_id

    def take_in(self, names: Sequence[PageHash]) -> dict[PageHash, int]:
        """As `Transfers.take_in`."""
        pages = self.scheduler.transfers.take_in(names)
        if self.log is not None:
            self.log.pages_came(names, pages.values(), self._clock.now_s())
        return pages

    def finish(self, request: Request, stop_reason: str) -> None:
        """Ends a request whose text met a stop string; the caller tells of it."""
        now_s = self._clock.now_s()
        found = self.scheduler.finish(request, RequestStatus.STOPPED, stop_reason, now_s)
        if self.log is not None:
            self.log.finished(request.request_id, stop_reason, found, now_s)

    def step(self) -> News:
        """One turn of the loop.

        Returns:
            What changed: newly committed tokens and terminal events, oldest first.
        """
        masks = self._poll_masks()
        begun_s = self._clock.now_s()
        news = self._take_news()
        unblocked, appended = self._unblock(masks, begun_s)
        news.items += appended
        try:
            plan = self._plan(news, unblocked, appended, begun_s)
        except Exception as error:
            if not self._survives_bugs:
                raise
            self.num_bugs += 1
            news.extend(self.recovery.after_failure(error, self.scheduler.live_requests))
            return news
        if plan is not None:
            self.num_turns += 1
            news.extend(self._dispatch(plan))
        self.host_s += self._clock.now_s() - begun_s
        if len(self._in_flight) >= self._max_in_flight or (plan is None and self._in_flight):
            self.num_turns += 1
            news.extend(self._commit())
        elif plan is None and self.recovery.settle():
            self.num_turns += 1  # suspects were cancelled, or their time was over
        elif plan is None:
            self.executor.idle()
            if self.masks is not None:
                self.masks.wait()
        if len(self._news):
            news.extend(self._take_news())
        return news

    def _plan(
        self,
        news: News,
        unblocked: Sequence[Unblocked],
        appended: Sequence[Committed],
        now_s: float,
    ) -> StepPlan | None:
        """Takes in what happened meanwhile and decides the next step; adds who ended to `news`.

        Args:
            unblocked: requests whose grammars let them go on.
            appended: news of those of them that were given forced tokens.
        """
        transfers = self.executor.poll_transfers()
        for done in transfers:
            self.scheduler.complete_transfer(*done[:2], now_s, done.seconds)
            self.num_turns += 1
        ended = self.scheduler.expire(now_s)
        news.items += [_ended(request) for request in ended]
        plan = self.scheduler.plan(now_s)
        rejected = self.scheduler.take_ended()
        news.items += [_ended(request) for request in rejected]
        if self.log is not None:
            ends = [item.request for item in appended if item.finished]
            self.log.turned(plan, transfers, unblocked, [*ends, *ended, *rejected], now_s)
        return plan

    def _poll_masks(self) -> list[MaskReady]:
        """Masks that are there; ends the requests that have none, and never will."""
        if self.masks is None:
            return []
        self.masks.take()
        ready: list[MaskReady] = []
        for item in self.masks.poll():
            if item.error is not None:
                self.cancel(item.request_id, RequestStatus.FAILED, item.error)
            else:
                ready.append(item)
        self.num_turns += bool(ready)
        return ready

    def _unblock(
        self, ready: Sequence[MaskReady], now_s: float
    ) -> tuple[list[Unblocked], list[Committed]]:
        """Unblocks the requests whose masks are there, and has the scheduler append what their
        grammars force; which requests, and their news."""
        unblocked = [Unblocked(item.request_id, item.num_tokens, item.forced) for item in ready]
        for item in unblocked:
            self.scheduler.unblock(item.request_id, item.num_tokens)
        offers = [item for item in unblocked if item.forced]
        if not offers:
            return unblocked, []
        assert self.masks is not None
        news = self.scheduler.append_forced(offers, now_s).items
        counts = {item.request.request_id: len(item.new_token_ids) for item in news}
        for request_id in counts:
            self.masks.appended(request_id)
        counted = [item._replace(num_appended=counts.get(item.request_id, 0)) for item in unblocked]
        return counted, news

    def _dispatch(self, plan: StepPlan) -> News:
        try:
            self._in_flight.append((plan, self.executor.dispatch(plan)))
            self.scheduler.apply_plan()
        except Exception as error:
            # Steps already on the device may still be read: only this one is lost.
            news, num_recoveries = News(), self.recovery.num_recoveries
            for _ in range(len(self._in_flight)):
                news.extend(self._commit())
            # If one of these failed, too, it was the same fault.
            if self.recovery.num_recoveries == num_recoveries:
                news.extend(self.recovery.after_failure(error, _requests(plan)))
            return news
        return News()

    def _commit(self) -> News:
        if not self._in_flight:  # an earlier failure emptied it
            return News()
        plan, handle = self._in_flight.popleft()
        asked_s = self._clock.now_s()
        try:
            result = self.executor.result(handle)
        except Exception as error:
            return self.recovery.after_failure(error, _requests(plan))
        begun_s = self._clock.now_s()
        self.waited_s += begun_s - asked_s
        try:
            committed = self.scheduler.commit(plan, result, begun_s)
        except Exception as error:
            if not self._survives_bugs:
                raise
            self.num_bugs += 1
            news = self.scheduler.take_back(plan)
            news.extend(self.recovery.after_failure(error, _requests(plan)))
            return news
        self.host_s += self._clock.now_s() - begun_s
        if self.log is not None:
            ended = [item.request for item in committed.items if item.finished]
            self.log.committed(plan, result, ended, begun_s)
        if result.broken:
            requests = _requests(plan)
            committed.extend(self.recovery.after_broken_rows([requests[i] for i in result.broken]))
        else:
            self.recovery.settle()
        return committed

    def recover(self, error: Exception) -> None:
        """Starts over after an exception outside of a step; nobody is to blame."""
        self.num_bugs += 1
        self._news.extend(self.recovery.after_failure(error, []))

    def _reset(self) -> None:
        """Drops the steps in flight and gives the device fresh state."""
        self._in_flight.clear()
        self.executor.reset()

    def _take_news(self) -> News:
        news, self._news = self._news, News()
        return news


def _requests(plan: StepPlan) -> list[Request]:
    return [*plan.decode_rows.requests, *(row.request for row in plan.prefill_rows)]


def _ended(request: Request) -> Committed:
    return Committed(request, (), None, None, finished=True)
