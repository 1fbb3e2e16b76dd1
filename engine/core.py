"""The one loop everybody reads first: plan, dispatch, commit.

While step N runs, step N+1 is planned and dispatched; a row's next input token is read on the
device, so the host never waits for it. Then N's tokens are read and committed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from octavo.engine.clock import Clock
from octavo.engine.errors import OctavoError, QuarantinedError
from octavo.engine.executor import StepExecutor
from octavo.engine.faults.quarantine import Quarantine
from octavo.engine.faults.suspects import Suspects
from octavo.engine.observability.observers import Observer
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler.committer import Committed, News
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import StepPlan
from octavo.engine.structured.masks import TokenMasks

logger = logging.getLogger(__name__)

RESET_ATTEMPTS = 3
"""Times that a device is asked for a fresh state before it is given up."""
MAX_REMEMBERED = 4096
"""Requests of which it is kept that their numbers were not finite once."""


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
        self._suspects = Suspects()
        self._broke_once: OrderedDict[str, None] = OrderedDict()
        self.quarantine = Quarantine()
        self.num_recoveries = 0
        """Steps that failed, so that everybody started over."""
        self.num_quarantined = 0
        """Requests that were found to make steps fail."""
        self.num_bugs = 0
        """Exceptions of the scheduler among the causes of recoveries."""
        self.host_s = 0.0
        """Seconds spent planning, packing, dispatching and committing, waiting not included."""
        self.waited_s = 0.0
        """Seconds spent waiting for the device."""
        self.masks: TokenMasks | None = None
        """Token masks of requests that a grammar constrains. None if structured output is off."""
        self.log: Observer | None = None
        """Told of everything that goes in and comes out, if set."""
        self.num_turns = 0
        """Turns in which a step was dispatched or committed, or a copy ended."""

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
        self.quarantine.check(request, now_s)
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
        ready = self._unblock()
        begun_s = self._clock.now_s()
        news = self._take_news()
        try:
            plan = self._plan(news, ready, begun_s)
        except Exception as error:
            if not self._survives_bugs:
                raise
            self.num_bugs += 1
            news.extend(self._recover(error, self.scheduler.live_requests))
            return news
        if plan is not None:
            self.num_turns += 1
            news.extend(self._dispatch(plan))
        self.host_s += self._clock.now_s() - begun_s
        if len(self._in_flight) >= self._max_in_flight or (plan is None and self._in_flight):
            self.num_turns += 1
            news.extend(self._commit())
        elif plan is None and self._suspects.is_trying and self._suspects.settle():
            self._go_on()  # they were cancelled, or their time was over: the others may run now
            self.num_turns += 1
        elif plan is None:
            self.executor.idle()
            if self.masks is not None:
                self.masks.wait()
        if len(self._news):
            news.extend(self._take_news())
        return news

    def _plan(self, news: News, ready: list[tuple[str, int]], now_s: float) -> StepPlan | None:
        """Takes in what happened meanwhile and decides the next step; adds who ended to `news`."""
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
            self.log.turned(plan, transfers, ready, [*ended, *rejected], now_s)
        return plan

    def _unblock(self) -> list[tuple[str, int]]:
        """Unblocks the requests whose masks are there; which, and from how many tokens."""
        ready: list[tuple[str, int]] = []
        if self.masks is None:
            return ready
        self.masks.take()
        for item in self.masks.poll():
            if item.error is not None:
                self.cancel(item.request_id, RequestStatus.FAILED, item.error)
                continue
            self.scheduler.unblock(item.request_id, item.num_tokens)
            ready.append((item.request_id, item.num_tokens))
        self.num_turns += bool(ready)
        return ready

    def _dispatch(self, plan: StepPlan) -> News:
        try:
            self._in_flight.append((plan, self.executor.dispatch(plan)))
            self.scheduler.apply_plan()
        except Exception as error:
            # Steps already on the device may still be read: only this one is lost.
            news, num_recoveries = News(), self.num_recoveries
            for _ in range(len(self._in_flight)):
                news.extend(self._commit())
            if self.num_recoveries == num_recoveries:  # else it was the same fault, told twice
                news.extend(self._recover(error, _requests(plan)))
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
            return self._recover(error, _requests(plan))
        begun_s = self._clock.now_s()
        self.waited_s += begun_s - asked_s
        try:
            committed = self.scheduler.commit(plan, result, begun_s)
        except Exception as error:
            if not self._survives_bugs:
                raise
            self.num_bugs += 1
            news = self.scheduler.take_back(plan)
            news.extend(self._recover(error, _requests(plan)))
            return news
        self.host_s += self._clock.now_s() - begun_s
        if self.log is not None:
            ended = [item.request for item in committed.items if item.finished]
            self.log.committed(plan, result, ended, begun_s)
        if result.broken:
            committed.extend(self._recover_from_broken_rows(plan, result.broken))
        elif self._suspects.is_trying and self._suspects.settle():
            self._go_on()
        return committed

    # Failures.

    def recover(self, error: Exception) -> None:
        """Starts over after an exception outside of a step; nobody is to blame."""
        self.num_bugs += 1
        self._news.extend(self._recover(error, []))

    def _recover(self, error: Exception, suspects: list[Request]) -> News:
        """Everybody starts over on a fresh device, those on trial first; the guilty one ends.

        Args:
            suspects: requests that may be the cause.
        """
        logger.error("a step failed: recovering", exc_info=error)
        self._start_over()
        guilty = self._suspects.blame([r for r in suspects if not r.status.is_finished])
        news = News()
        if guilty is not None:
            news = self._quarantine(guilty, f"{type(error).__name__}: {error}")
        self._go_on()
        return news

    def _recover_from_broken_rows(self, plan: StepPlan, rows: Sequence[int]) -> News:
        """As `_recover`, after a step that worked but for these rows: it is known who is guilty."""
        requests = _requests(plan)
        broken = [requests[index] for index in rows if not requests[index].status.is_finished]
        logger.error("%d rows of a step are not finite: recovering", len(rows))
        self._start_over([request.request_id for request in broken])
        news = News()
        for request in broken:
            if request.request_id in self._broke_once:
                news.extend(self._quarantine(request, "its numbers on the device are not finite"))
            else:
                self._broke_once[request.request_id] = None
                if len(self._broke_once) > MAX_REMEMBERED:
                    self._broke_once.popitem(last=False)
        self._go_on()
        return news

    def _start_over(self, broken: Sequence[str] = ()) -> None:
        """Drops every step on its way, and makes the state on both sides anew.

        Raises: whatever the device raises when it cannot be used any more.
        """
        now_s = self._clock.now_s()
        self.num_recoveries += 1
        self._in_flight.clear()
        self.scheduler.recover(now_s, broken)
        if self.log is not None:
            self.log.failed(broken, now_s)
        for attempt in range(RESET_ATTEMPTS):
            try:
                self.executor.reset()
                return
            except Exception:
                if attempt == RESET_ATTEMPTS - 1:
                    raise
                logger.exception("the device could not be used again yet")

    def _quarantine(self, guilty: Request, cause: str) -> News:
        now_s = self._clock.now_s()
        self.num_quarantined += 1
        error = QuarantinedError(f"request {guilty.request_id} made steps fail twice ({cause})")
        self.quarantine.put(guilty, now_s)
        self.scheduler.cancel(guilty.request_id, now_s, RequestStatus.FAILED, error)
        if self.log is not None:
            self.log.cancelled(guilty.request_id, RequestStatus.FAILED.value, True, now_s)
        return News([_ended(guilty)])

    def _go_on(self) -> None:
        """Lets those on trial run, or everybody."""
        self._suspects.settle()
        may_run = self._suspects.may_run
        self.scheduler.only(may_run)
        if self.log is not None:
            self.log.only(may_run, self._clock.now_s())

    def _take_news(self) -> News:
        news, self._news = self._news, News()
        return news


def _requests(plan: StepPlan) -> list[Request]:
    return [*plan.decode_rows.requests, *(row.request for row in plan.prefill_rows)]


def _ended(request: Request) -> Committed:
    return Committed(request, (), None, None, finished=True)
