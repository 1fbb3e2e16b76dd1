"""What was decided about each request, for whoever asks why it took so long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from octavo.engine.scheduler.step_plan import Decision, Reason

MAX_TRACES = 4096
MAX_EVENTS = 256


class TraceEvent(NamedTuple):
    """A decision about one request: see `Reason`."""

    at_s: float
    decision: Decision
    text: str
    beneficiary: str
    num_tokens: int
    cost_s: float


class Traces:
    """The newest events of the requests that were decided about last."""

    def __init__(self) -> None:
        self._events: OrderedDict[str, list[TraceEvent]] = OrderedDict()

    def note(self, reasons: Iterable[Reason], now_s: float) -> None:
        """Adds a plan's reasons."""
        for reason in reasons:
            if not reason.request_id:
                continue
            events = self._events.setdefault(reason.request_id, [])
            self._events.move_to_end(reason.request_id)
            if len(events) < MAX_EVENTS:
                events.append(TraceEvent(now_s, *reason[1:]))
        while len(self._events) > MAX_TRACES:
            self._events.popitem(last=False)

    def of(self, request_id: str) -> tuple[TraceEvent, ...]:
        """A request's events, oldest first."""
        return tuple(self._events.get(request_id, ()))
