"""When what is due: targets and deadlines turned into times."""

from __future__ import annotations

import math

from octavo.engine.request import Request

PACE_MARGIN = 0.03
"""Share of a promised pace that is kept back: of rows that are scheduled to end on the point, half
end a little beyond it."""


def pace_s(request: Request) -> float | None:
    """Seconds a token that the scheduler aims at; None if no pace was promised."""
    tpot_s = request.tpot_target_s
    return None if tpot_s is None else tpot_s * (1.0 - PACE_MARGIN)


def first_due_s(request: Request) -> float:
    """When its first token is due; infinity if it has come, or if none was promised."""
    if request.ttft_target_s is None or request.metrics.first_token_s is not None:
        return math.inf
    return request.arrival_s + request.ttft_target_s


def end_due_s(request: Request) -> float:
    """When its last token is due, by its end-to-end target or deadline; infinity if never."""
    due_s = math.inf if request.deadline_s is None else request.deadline_s
    if request.e2e_target_s is not None:
        due_s = min(due_s, request.arrival_s + request.e2e_target_s)
    return due_s


def was_in_time(request: Request) -> bool:
    """Whether its first token has come, and no later than was promised."""
    first_s, target_s = request.metrics.first_token_s, request.ttft_target_s
    return first_s is not None and (target_s is None or first_s <= request.arrival_s + target_s)


def next_due_s(request: Request) -> float:
    """When its next milestone is due; infinity if nothing was promised.

    Before the first token that is the first token, or the end. After it, the next token by TPOT
    (token k at `first + k · TPOT`: early tokens bank slack), or the end.
    """
    due_s = end_due_s(request)
    first_s = request.metrics.first_token_s
    if first_s is None:
        if request.ttft_target_s is not None:
            due_s = min(due_s, request.arrival_s + request.ttft_target_s)
    else:
        tpot_s = pace_s(request)
        if tpot_s is not None:
            due_s = min(due_s, first_s + len(request.output_token_ids) * tpot_s)
    return due_s
