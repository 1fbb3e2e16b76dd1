"""Who gives way: the cheapest to lose for the pages it holds, and only when that helps."""

from __future__ import annotations

import math
from typing import NamedTuple

from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import end_due_s, next_due_s
from octavo.engine.scheduler.policies.policy import Place
from octavo.engine.scheduler.snapshot import Snapshot

MAX_PREEMPTIONS = 2
"""Times a request may give way to a waiting one; from then on it is pinned to its row."""

LOST_TARGET = 1e3
"""What a missed target weighs against seconds of the machine, when victims are compared."""


class ResumeCost(NamedTuple):
    """What it takes to bring a preempted request back.

    Attributes:
        machine_s: seconds of device time.
        delay_s: seconds until it goes on, once it is let in again.
    """

    machine_s: float
    delay_s: float


def resume_cost(snapshot: Snapshot, victim: Request) -> ResumeCost:
    """Of a swap, if there is room for one and it is the faster way, or of computing again."""
    forecast = snapshot.forecast
    num_tokens = victim.num_computed_tokens
    prefill_s = forecast.prefill_s(num_tokens)
    copy_s = 2 * math.ceil(num_tokens / snapshot.limits.page_size) * forecast.page_copy_s
    if snapshot.limits.num_host_pages and copy_s < prefill_s:
        return ResumeCost(0.0, copy_s)
    return ResumeCost(prefill_s, prefill_s)


def spare_s(snapshot: Snapshot, request: Request) -> float:
    """Seconds that a request could stand still and yet be in time; infinity without a target."""
    forecast = snapshot.forecast
    end_s = end_due_s(request)
    spare = math.inf
    if end_s < math.inf:
        missing = request.num_tokens - request.num_computed_tokens
        left_s = forecast.remaining_tokens(request) * forecast.step_s
        spare = end_s - snapshot.now_s - left_s - forecast.prefill_s(max(missing - 1, 0))
    if request.tpot_target_s is not None or request.ttft_target_s is not None:
        spare = min(spare, next_due_s(request) - snapshot.now_s)
    return spare


class Candidate(NamedTuple):
    """A running request as a victim: the smaller, the sooner it gives way."""

    loss_per_page: float
    place: tuple[float, ...]
    index: int
    num_pages: int
    machine_s: float
    keeps_target: bool
    request: Request


def candidates(
    snapshot: Snapshot, places: list[Place]
) -> list[Candidate]:
    """Running requests, the cheapest to lose for each page first; among equals the last in order.

    Args:
        places: of the running requests, in their order.
    """
    page_size = snapshot.limits.page_size
    found: list[Candidate] = []
    for index, request in enumerate(snapshot.running):
        num_pages = -(-request.num_computed_tokens // page_size)
        cost = resume_cost(snapshot, request)
        spare = spare_s(snapshot, request)
        # Whoever is late already has no target left to lose.
        keeps = spare > cost.delay_s or spare < 0
        loss = cost.machine_s + (0.0 if keeps else LOST_TARGET)
        if spare < 0:
            loss = 0.0
        key = tuple(-value for value in places[index])
        found.append(
            Candidate(loss / max(num_pages, 1), key, index, num_pages, cost.machine_s, keeps, request)
        )
    found.sort(key=lambda item: item[:3])
    return found
