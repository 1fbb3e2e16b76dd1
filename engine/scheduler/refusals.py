"""How a request is refused: with the time to come back at, as unattainable, or not at all."""

from __future__ import annotations

import math

from octavo.engine.errors import OctavoError, OverloadedError, UnattainableTargetError
from octavo.engine.request import Request
from octavo.engine.scheduler.backlog import backlog_of_class, first_token_s, machine_s
from octavo.engine.scheduler.deadlines import (
    find_unattainable,
    latest_prefill_s,
    spare_s,
)
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.probes import Probes
from octavo.engine.scheduler.promised_returns import PromisedReturns
from octavo.engine.scheduler.request_table import RequestTable

KEPT_SPARE = 0.5
"""Share of what a request could wait that is left for what was not foreseen when it is told when to
come back."""

RESERVED = 1.25
"""Seconds reserved for each second of work that comes back: a machine that is to meet targets
cannot be planned to its last second, and what comes back is decoded, too."""


class Refusals:
    """Requests that are not served: what each is answered, and whether that was right.

    Args:
        forecast: what steps take.

    Attributes:
        probes: requests that were served although they were to be refused.
        promises: when those who were sent away will come back.
        num_unattainable: requests refused because no idle machine could meet their targets.
    """

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self.probes = Probes()
        self.promises = PromisedReturns()
        self.num_unattainable = 0

    def leaves_no_room(self, table: RequestTable, request: Request, now_s: float) -> bool:
        """Whether the work of clients who were asked to come back keeps a new request from being
        in time, each step taking no more than the low quantile says."""
        forecast = self._forecast
        if not len(self.promises) or not forecast.is_sound:
            return False
        latest_s = latest_prefill_s(request, now_s, forecast)
        if latest_s == math.inf:
            return False
        promised_s = self.promises.work_before_s(latest_s, now_s)
        if not promised_s:
            return False
        ahead = backlog_of_class(table, request.priority)
        tokens = request.num_missing_tokens
        first_s = first_token_s(table, forecast, tokens, ahead, now_s) + promised_s
        share = forecast.step_time.least_share(now_s, is_prefill=True)
        return now_s + share * first_s > latest_s

    def at_door(
        self, table: RequestTable, request: Request, reason: str, now_s: float
    ) -> OctavoError:
        """The error for a new request."""
        found = find_unattainable(request, self._forecast)
        if found is None:
            return self.overloaded(table, request, reason, now_s)
        self.num_unattainable += 1
        return UnattainableTargetError(found.field, getattr(request, found.field), found.least_s)

    def overloaded(
        self, table: RequestTable, request: Request, reason: str, now_s: float
    ) -> OverloadedError:
        """The error that tells a client when to come back; reserves the request's work then."""
        forecast = self._forecast
        free_s, spare = self._backlog_s(table, request, now_s), spare_s(request, forecast)
        if spare < math.inf:
            free_s -= KEPT_SPARE * max(spare, 0.0)
        free_s = max(free_s, self._slow_s(request, now_s))
        work_s = RESERVED * machine_s(request, forecast)
        wait_s = self.promises.promise(request, now_s, free_s, work_s)
        return OverloadedError(f"request {request.request_id} {reason}", wait_s)

    def _backlog_s(self, table: RequestTable, request: Request, now_s: float) -> float:
        """Seconds until the prompts that are there now will have been computed."""
        ahead = backlog_of_class(table, request.priority)
        return first_token_s(table, self._forecast, 0, ahead, now_s)

    def _slow_s(self, request: Request, now_s: float) -> float:
        """Seconds until the machine, slower now than it was, will be believed to be fast again if
        no step says otherwise; 0 unless that is what stands in the request's way."""
        target_s, errors = request.ttft_target_s, self._forecast.step_time.prefill
        if target_s is None:
            return 0.0
        least_s = self._forecast.least_prefill_s(request.num_missing_tokens, now_s)
        if least_s <= target_s:
            return 0.0
        doubted_s = errors.doubted_s(errors.doubt(now_s) * least_s / target_s)
        return 0.0 if doubted_s == math.inf else max(0.0, doubted_s - now_s)
