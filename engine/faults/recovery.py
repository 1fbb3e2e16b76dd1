"""Starting over after a failed step, and ending the request that makes steps fail."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from octavo.engine.clock import Clock
from octavo.engine.errors import EngineDeadError, QuarantinedError
from octavo.engine.faults.quarantine import Quarantine
from octavo.engine.faults.suspects import Suspects
from octavo.engine.observability.observers import Observer
from octavo.engine.request import Request, RequestStatus
from octavo.engine.scheduler.committer import Committed, News
from octavo.engine.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

RESET_ATTEMPTS = 3
"""Attempts to give a device fresh state; after the last, the engine is dead."""
MAX_REMEMBERED = 4096
"""Requests remembered because their numbers were not finite once."""


class Recovery:
    """Keeps the loop going when steps fail.

    Every request starts over from its tokens, on fresh device state. Suspects run first, in groups,
    until the guilty request is found; that request ends, and its prompt is quarantined.

    Args:
        scheduler: is told which requests may run, and ends the guilty one.
        reset: drops the steps in flight and gives the device fresh state.
        clock: tells the time.

    Attributes:
        quarantine: prompts that made steps fail.
        num_recoveries: failed steps after which all requests started over.
        num_quarantined: requests that were found to make steps fail.
        log: observer of failures, of guilty requests and of trials; None if there is none.
    """

    def __init__(self, scheduler: Scheduler, reset: Callable[[], None], clock: Clock) -> None:
        self._scheduler = scheduler
        self._reset = reset
        self._clock = clock
        self._suspects = Suspects()
        self._broke_once: OrderedDict[str, None] = OrderedDict()
        self.quarantine = Quarantine()
        self.num_recoveries = 0
        self.num_quarantined = 0
        self.log: Observer | None = None

    def after_failure(self, error: Exception, suspects: Sequence[Request]) -> News:
        """Starts over after a step that raised.

        Args:
            suspects: requests of the failed step: one of them may be the cause.

        Returns:
            The terminal event of the guilty request, if this failure convicts one.

        Raises: whatever the device raises if it cannot be reset; the error itself if it says that
            the engine is dead.
        """
        if isinstance(error, EngineDeadError):
            raise error
        logger.error("a step failed: recovering", exc_info=error)
        self._start_over()
        guilty = self._suspects.blame([r for r in suspects if not r.status.is_finished])
        news = News()
        if guilty is not None:
            news = self._quarantine(guilty, f"{type(error).__name__}: {error}")
        self._go_on()
        return news

    def after_broken_rows(self, broken: Sequence[Request]) -> News:
        """Starts over after a step that gave some requests numbers that are not finite.

        A request ends when that happens to it a second time.

        Args:
            broken: these requests. Finished ones are passed over.

        Returns:
            Terminal events of requests that broke twice.

        Raises: whatever the device raises if it cannot be reset.
        """
        logger.error("%d rows of a step are not finite: recovering", len(broken))
        live = [request for request in broken if not request.status.is_finished]
        self._start_over([request.request_id for request in live])
        news = News()
        for request in live:
            if request.request_id in self._broke_once:
                news.extend(self._quarantine(request, "its numbers on the device are not finite"))
            else:
                self._broke_once[request.request_id] = None
                if len(self._broke_once) > MAX_REMEMBERED:
                    self._broke_once.popitem(last=False)
        self._go_on()
        return news

    def settle(self) -> bool:
        """Clears suspects that have passed. If that ends a trial, the next requests may run.

        Returns:
            Whether it ended one.
        """
        if not self._suspects.is_trying or not self._suspects.settle():
            return False
        self._go_on()
        return True

    def _start_over(self, broken: Sequence[str] = ()) -> None:
        """Gives the scheduler and the device fresh state."""
        now_s = self._clock.now_s()
        self.num_recoveries += 1
        self._scheduler.recover(now_s, broken)
        if self.log is not None:
            self.log.failed(broken, now_s)
        for attempt in range(RESET_ATTEMPTS):
            try:
                self._reset()
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
        self._scheduler.cancel(guilty.request_id, now_s, RequestStatus.FAILED, error)
        if self.log is not None:
            self.log.cancelled(guilty.request_id, RequestStatus.FAILED.value, True, now_s)
        return News([Committed(guilty, (), None, None, finished=True)])

    def _go_on(self) -> None:
        """Lets the requests on trial run; all requests, if none is on trial."""
        self._suspects.settle()
        may_run = self._suspects.may_run
        self._scheduler.only(may_run)
        if self.log is not None:
            self.log.only(may_run, self._clock.now_s())
