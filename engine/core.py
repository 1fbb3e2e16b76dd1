"""The one loop everybody reads first: plan, dispatch, commit.

While step N runs, step N+1 is planned and dispatched; a row's next input token is read on the
device, so the host never waits for it. Then N's tokens are read and committed.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

from octavo.engine.clock import Clock
from octavo.engine.errors import OctavoError, StepFailedError
from octavo.engine.event_log import EventLog
from octavo.engine.executor import StepExecutor
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler.committed import Committed, News
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import StepPlan
from octavo.engine.structured.masks import TokenMasks

logger = logging.getLogger(__name__)


class EngineCore:
    """Turns requests into tokens, a step at a time. Not thread-safe: one thread drives it.

    Args:
        scheduler: decides.
        executor: computes.
        clock: tells the time.
        overlap: keep one step in flight while the next is planned.
    """

    def __init__(
        self, scheduler: Scheduler, executor: StepExecutor, clock: Clock, *, overlap: bool = True
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._clock = clock
        self._max_in_flight = 2 if overlap else 1
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._news = News()
        self.host_s = 0.0
        """Seconds spent planning, packing, dispatching and committing, waiting not included."""
        self.masks: TokenMasks | None = None
        """Of the gated requests; who sets none takes none."""
        self.log: EventLog | None = None
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
            InvalidRequestError, DuplicateRequestError: it can never be served.
            OverloadedError: not now; DeadlineExceededError: not any more.
        """
        now_s = self._clock.now_s()
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
        self._forget(request_id)

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
        self._forget(request.request_id)

    def step(self) -> News:
        """One turn of the loop.

        Returns:
            What changed: newly committed tokens and terminal events, oldest first.
        """
        ready = self._release()
        begun_s = self._clock.now_s()
        news = self._take_news()
        transfers = self.executor.poll_transfers()
        for done in transfers:
            self.scheduler.complete_transfer(done.transfer_id, done.ok, begun_s)
            self.num_turns += 1
        ended = self.scheduler.expire(begun_s)
        plan = self.scheduler.plan(begun_s)
        ended += self.scheduler.take_ended()
        if ended:
            news.items += [_ended(request) for request in ended]
        if self.log is not None:
            self.log.turned(plan, transfers, ready, ended, begun_s)
        if plan is not None:
            self.num_turns += 1
            news.extend(self._dispatch(plan))
        self.host_s += self._clock.now_s() - begun_s
        if len(self._in_flight) >= self._max_in_flight or (plan is None and self._in_flight):
            self.num_turns += 1
            news.extend(self._commit())
        elif plan is None:
            self.executor.idle()
            if self.masks is not None:
                self.masks.wait()
        if len(self._news):
            news.extend(self._take_news())
        if self.masks is not None and self.masks.num_live:
            for item in news.items:
                if item.finished:
                    self._forget(item.request.request_id)
        return news

    def _release(self) -> list[tuple[str, int]]:
        """Lets the gated requests go on whose masks are there; which, and from how many tokens."""
        if self.masks is None or not self.masks.is_busy:
            return []
        ready = []
        for item in self.masks.poll():
            if item.error is not None:
                self.cancel(item.request_id, RequestStatus.FAILED, item.error)
                continue
            self.scheduler.release(item.request_id, item.num_tokens)
            ready.append((item.request_id, item.num_tokens))
        self.num_turns += bool(ready)
        return ready

    def _forget(self, request_id: str) -> None:
        if self.masks is not None:
            self.masks.drop(request_id)

    def _dispatch(self, plan: StepPlan) -> News:
        try:
            self._in_flight.append((plan, self.executor.dispatch(plan)))
        except Exception as error:
            # Steps already on the device may still be read: only this one is lost.
            news = News()
            for _ in range(len(self._in_flight)):
                news.extend(self._commit())
            news.extend(self._fail([plan], error))
            return news
        return News()

    def _commit(self) -> News:
        if not self._in_flight:  # an earlier failure emptied it
            return News()
        plan, handle = self._in_flight.popleft()
        try:
            result = self.executor.result(handle)
        except Exception as error:
            later = [item for item, _ in self._in_flight]
            self._in_flight.clear()
            return self._fail([plan, *later], error)
        begun_s = self._clock.now_s()
        committed = self.scheduler.commit(plan, result, begun_s)
        if self.masks is not None and self.masks.num_live:
            self.masks.take(
                (item.request.request_id, item.new_token_ids)
                for item in committed
                if not item.finished
            )
        self.host_s += self._clock.now_s() - begun_s
        if self.log is not None:
            ended = [item.request for item in committed.items if item.finished]
            self.log.committed(plan, result, ended, begun_s)
        return committed

    def _fail(self, plans: list[StepPlan], error: Exception) -> News:
        """Ends the requests of steps that failed; everyone else starts over on a fresh device."""
        logger.error("a step failed", exc_info=error)
        typed = StepFailedError(f"the device step failed: {type(error).__name__}: {error}")
        now_s = self._clock.now_s()
        ended = [request for plan in plans for request in self.scheduler.fail(plan, typed, now_s)]
        if self.scheduler.num_dispatched == 0:
            self.scheduler.forget_device_state()
        self.executor.reset()
        if self.log is not None:
            self.log.failed(plans, ended, now_s)
        return News(_ended(request) for request in ended)

    def _take_news(self) -> News:
        news, self._news = self._news, News()
        return news


def _ended(request: Request) -> Committed:
    return Committed(request, (), None, None, finished=True)
