"""Refusals put to the test: a few requests that would be refused are served, and watched."""

from __future__ import annotations

import math
import zlib
from typing import NamedTuple

from octavo.engine.request import Request

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
