"""How a request is refused: with the time to come back at, as unattainable, or not at all.

A client that is asked to come back finds room then (`PromisedReturns`). A few requests that were to
be refused are served instead, to see whether refusing them would have been right (`Probes`).
"""

from __future__ import annotations

import math
import zlib
from bisect import insort
from typing import NamedTuple

from octavo.engine.errors import OctavoError, OverloadedError, UnattainableTargetError
from octavo.engine.request import Request
from octavo.engine.scheduler.feasibility import find_unattainable, latest_prefill_s, spare_s
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.load import backlog_of_class, first_token_s, machine_s
from octavo.engine.scheduler.policy import HOPELESS, Policy, Refusal, refuse_nobody
from octavo.engine.scheduler.request_table import RequestTable

MOST_PROMISES = 1024
"""Promises that are kept at the most; beyond them a client is sent away without one."""
_GRACE_S = 2.0
_GRACE_SHARE = 0.25
_EARLY_S = 0.1
_LEAST_WAIT_S = 0.1
_FADE = 0.97


class _Promise(NamedTuple):
    return_s: float
    number: int
    expires_s: float
    work_s: float
    key: tuple[object, ...]


class PromisedReturns:
    """A ledger of `retry_after` times, so that clients who come back find room.

    Each refusal reserves the request's work at its return time, behind the work that is there and
    behind the returns promised before: clients that are refused together come back one after the
    other. A promise ends when an equal request (tenant, prompt and targets) comes at its time or
    later, and expires 2 s, or a quarter of the wait, after it.

    Many clients never come back. Reserved work counts by the share of the promises that ended in
    a return, newer ones more. Until the first has ended, a return time counts all of the work, and
    the door none of it.
    """

    def __init__(self) -> None:
        self._promises: list[_Promise] = []
        self._num_made = 0
        self._num_kept = self._num_ended = 0.0
        self._work_s = 0.0

    def __len__(self) -> int:
        return len(self._promises)

    def promise(self, request: Request, now_s: float, free_s: float, work_s: float) -> float:
        """Sends a client away.

        Args:
            request: what was refused.
            now_s: engine clock.
            free_s: seconds until the request would be in time, by the work that is there now.
            work_s: seconds of the machine that it takes.

        Returns:
            Seconds after which it should come back.
        """
        self._expire(now_s)
        share = (self._num_kept + 1.0) / (self._num_ended + 1.0)
        wait_s = max(free_s + share * self._work_s, _LEAST_WAIT_S)
        if len(self._promises) < MOST_PROMISES:
            expires_s = now_s + wait_s + max(_GRACE_S, _GRACE_SHARE * wait_s)
            self._num_made += 1
            insort(
                self._promises,
                _Promise(now_s + wait_s, self._num_made, expires_s, work_s, _key(request)),
            )
            self._work_s += work_s
        return wait_s

    def claim(self, request: Request, now_s: float) -> bool:
        """Whether a request is one that was promised room now; ends that promise."""
        if not self._promises:
            return False
        self._expire(now_s)
        key = _key(request)
        for index, promise in enumerate(self._promises):
            if promise.return_s > now_s + _EARLY_S:
                break
            if promise.key == key:
                self._end(index, is_kept=True)
                return True
        return False

    def work_before_s(self, until_s: float, now_s: float) -> float:
        """Seconds of work that is expected to come back before `until_s`."""
        if not self._promises:
            return 0.0
        self._expire(now_s)
        work_s = 0.0
        for promise in self._promises:
            if promise.return_s > until_s:
                break
            work_s += promise.work_s
        return work_s * self._num_kept / (self._num_ended + 1.0)

    def _expire(self, now_s: float) -> None:
        index = 0
        while index < len(self._promises) and self._promises[index].return_s < now_s:
            if self._promises[index].expires_s < now_s:
                self._end(index, is_kept=False)
            else:
                index += 1

    def _end(self, index: int, *, is_kept: bool) -> None:
        promise = self._promises.pop(index)
        self._work_s = self._work_s - promise.work_s if self._promises else 0.0
        self._num_kept = self._num_kept * _FADE + is_kept
        self._num_ended = self._num_ended * _FADE + 1.0


def _key(request: Request) -> tuple[object, ...]:
    """What a request that comes back has in common with the one that was refused."""
    token_ids = request.prompt_token_ids
    return (
        request.tenant, request.priority, request.max_tokens, len(token_ids),
        tuple(token_ids[:16]), tuple(token_ids[-16:]),
        request.ttft_target_s, request.tpot_target_s, request.e2e_target_s,
    )  # fmt: skip


ONE_IN = 8
"""Of requests that are to be refused, how many there are to a candidate."""
MOST_SHARE = 0.01
"""Of all computed tokens, what probes may take."""


class ProbeLoad(NamedTuple):
    """What probes have shown.

    Attributes:
        num_probes: probes that have ended.
        num_wrong: of those, probes that were on time: refusing them would have been wrong.
        num_tokens: tokens that probes took, or may still take.
    """

    num_probes: int = 0
    num_wrong: int = 0
    num_tokens: int = 0


class Probes:
    """Chooses probes, and counts how they end.

    A request is a candidate by a hash of the engine's own id, which no client chooses. It is
    served with the standing that it asked for, if all probes together, with every token that it may
    still emit, stay within 1% of what has been computed.
    """

    def __init__(self) -> None:
        self._live: dict[str, Request] = {}
        self._num_probes = self._num_wrong = self._num_spent = self._num_reserved = 0

    def __len__(self) -> int:
        return len(self._live)

    def takes(self, request: Request, num_computed: int) -> bool:
        """Whether a request that is about to be refused is served as a probe.

        Args:
            num_computed: tokens computed so far, for everybody.
        """
        if request.request_id in self._live:
            return True
        if zlib.crc32(request.request_id.encode()) % ONE_IN:
            return False
        taken = self._num_spent + self._num_reserved + request.max_total_tokens
        if taken > MOST_SHARE * num_computed:
            return False
        self._live[request.request_id] = request
        self._num_reserved += request.max_total_tokens
        return True

    def has(self, request: Request) -> bool:
        """Whether a request is a live probe."""
        return request.request_id in self._live

    def look(self) -> None:
        """Takes in how live probes have ended."""
        for request in [r for r in self._live.values() if r.status.is_finished]:
            self._end(request)

    def load(self) -> ProbeLoad:
        """The counts so far."""
        return ProbeLoad(self._num_probes, self._num_wrong, self._num_spent + self._num_reserved)

    def _end(self, request: Request) -> None:
        del self._live[request.request_id]
        self._num_reserved -= request.max_total_tokens
        self._num_spent += request.num_tokens
        is_late = _is_late(request)
        if is_late is not None:
            self._num_probes += 1
            self._num_wrong += not is_late


def _is_late(request: Request) -> bool | None:
    """Whether a request that has ended missed a target; None if that cannot be said, as it was
    cut short."""
    metrics = request.metrics
    ttft_s, target_s = metrics.ttft_s, request.ttft_target_s
    if ttft_s is not None and target_s is not None and ttft_s > target_s:
        return True
    if request.status.value not in ("stop", "length") or ttft_s is None:
        return None if request.status.value == "cancelled" else True
    last_s = (metrics.last_token_s or 0.0) - request.arrival_s
    if request.e2e_target_s is not None and last_s > request.e2e_target_s:
        return True
    tpot_s = metrics.tpot_s(len(request.output_token_ids))
    return tpot_s is not None and tpot_s > (request.tpot_target_s or math.inf)


def wilson_interval(num_true: int, num_all: int) -> tuple[float, float]:
    """The 95% interval of a share, from 0 to 1; all of that without any sample.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", JASA
    22(158), 1927.
    """
    if not num_all:
        return 0.0, 1.0
    z = 1.959964
    share, z2 = num_true / num_all, z * z
    middle = share + z2 / (2 * num_all)
    half = z * math.sqrt(share * (1 - share) / num_all + z2 / (4 * num_all * num_all))
    scale = 1 + z2 / num_all
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


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

    def at_door(
        self,
        table: RequestTable,
        policy: Policy,
        request: Request,
        num_computed: int,
        now_s: float,
    ) -> OctavoError | None:
        """Why a new request is not let in; None if it is, if only as a probe.

        Args:
            policy: the one that plans go by.
            num_computed: tokens computed so far, for everybody.
        """
        refusal = self._refuse(table, policy, request, now_s)
        if refusal is None or self.probes.takes(request, num_computed):
            return None
        found = find_unattainable(request, self._forecast)
        if found is None:
            return self.overloaded(table, request, refusal.reason, now_s)
        self.num_unattainable += 1
        return UnattainableTargetError(found.field, getattr(request, found.field), found.least_s)

    def _refuse(
        self, table: RequestTable, policy: Policy, request: Request, now_s: float
    ) -> Refusal | None:
        if policy.with_targets is not None and request.has_target:
            policy = policy.with_targets  # it takes over with the next plan
        if policy.refuse is refuse_nobody:
            return None
        has_promise = self.promises.claim(request, now_s)
        refusal = policy.refuse(table.snapshot(now_s), request)
        if refusal is not None or has_promise:
            return refusal
        no_room = self._leaves_no_room(table, request, now_s)
        return Refusal(HOPELESS) if no_room else None

    def _leaves_no_room(self, table: RequestTable, request: Request, now_s: float) -> bool:
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
