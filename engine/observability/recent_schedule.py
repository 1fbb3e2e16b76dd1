"""The schedule of the last seconds of a live engine, for as long as somebody looks at it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from octavo.engine.executor import TransferDone
from octavo.engine.observability.event_log import EventLines, request_record
from octavo.engine.observability.schedule import Schedule, ScheduleReader
from octavo.engine.request import Request
from octavo.engine.scheduler.forced_tokens import Unblocked
from octavo.engine.scheduler.step_plan import StepPlan

_log = logging.getLogger(__name__)

KEPT_S = 20.0
MOST_CELLS = 20_000
"""Rows of steps that are kept, about 5 MB: 256 rows at 50 ms a step fill it in four seconds."""
UNWATCHED_S = 10.0
"""Nobody has looked for so long: then it costs nothing any more."""


class RecentSchedule(EventLines):
    """An observer of the engine's loop.

    Args:
        now_s: on the engine's clock. Somebody looks.
        on_expiry: called, by the engine's thread, once nobody has looked for `UNWATCHED_S`.
    """

    def __init__(self, now_s: float, on_expiry: Callable[[], None]) -> None:
        self._reader = ScheduleReader()
        super().__init__(self._read)
        self._on_expiry = on_expiry
        self._looked_s = now_s
        self._num_cells = 0

    def look(self, now_s: float) -> Schedule:
        """The schedule of the last `KEPT_S`, or less if there was much. Somebody looks."""
        self._looked_s = now_s
        self._trim(now_s - KEPT_S)
        return self._reader.schedule.since(now_s - KEPT_S)

    def turned(
        self,
        plan: StepPlan | None,
        transfers: Sequence[TransferDone],
        ready: Sequence[Unblocked],
        ended: Iterable[Request],
        now_s: float,
    ) -> None:
        """See `EventLines.turned`."""
        if plan is not None:
            for request in (*plan.decode_rows.requests, *(r.request for r in plan.prefill_rows)):
                if not self._reader.knows(request.request_id):
                    self._add_running(request, now_s)
            self._num_cells += plan.num_rows
            if self._num_cells > 2 * MOST_CELLS:
                self._trim(now_s - KEPT_S)
        super().turned(plan, transfers, ready, ended, now_s)
        if now_s - self._looked_s > UNWATCHED_S:
            self._on_expiry()

    def _read(self, line: dict[str, Any]) -> None:
        """Reads a line. A picture that cannot be drawn costs the engine nothing: it begins anew."""
        try:
            self._reader.read(line)
        except Exception:
            _log.exception("the schedule that somebody looks at begins anew")
            self._reader = ScheduleReader()

    def _add_running(self, request: Request, now_s: float) -> None:
        """Tells of a request that had come before anybody looked, with its past."""
        first_s = request.metrics.first_token_s
        past = {"first_token_s": first_s, "num_output": len(request.output_token_ids)}
        self._write(t=now_s, add={**request_record(request), **past})

    def _trim(self, begin_s: float) -> None:
        """Forgets what ended before a time, and the oldest steps of more than `MOST_CELLS`."""
        self._num_cells = 0
        for step in reversed(self._reader.schedule.steps):
            if self._num_cells > MOST_CELLS:
                begin_s = max(begin_s, step.end_s)
                break
            self._num_cells += len(step.cells)
        self._reader.schedule = self._reader.schedule.since(begin_s)
