"""When what is due, and whether it can still be done: targets turned into times."""

from __future__ import annotations

import math

from octavo.engine.request import Request
from octavo.engine.scheduler.forecast import CAUTIOUS, Forecast


def has_target(request: Request) -> bool:
    """Whether anything was promised to the request.

    A deadline alone is no promise: most clients set a long one on every call, and what they have
    received when it passes is of use to them.
    """
    return (
        request.ttft_target_s is not None
        or request.tpot_target_s is not None
        or request.e2e_target_s is not None
    )


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
    elif request.tpot_target_s is not None:
        due_s = min(due_s, first_s + len(request.output_token_ids) * request.tpot_target_s)
    return due_s


def is_hopeless(request: Request, now_s: float, forecast: Forecast) -> bool:
    """Whether a waiting request will miss a target whatever is done from now on.

    That is, even if it were served alone; for its last token the cautious quantile of its remaining
    length is taken, so that it would be so even when it turns out short.
    """
    if not forecast.is_sound:
        return False
    end_due = end_due_s(request)
    has_first = request.metrics.first_token_s is not None
    if end_due == math.inf and (request.ttft_target_s is None or has_first):
        return False
    first_s = now_s + forecast.alone_prefill_s(request.num_tokens - request.num_computed_tokens)
    if end_due < math.inf:
        remaining = forecast.remaining_tokens(request, CAUTIOUS)
        if first_s + (remaining - 1) * forecast.alone_step_s > end_due:
            return True
    if has_first or request.ttft_target_s is None:
        return False
    return first_s > request.arrival_s + request.ttft_target_s


def will_be_late(request: Request, now_s: float, forecast: Forecast) -> bool:
    """Whether a request that is served next will miss a target at the speed of the present load.

    Unlike `is_hopeless` it does not grant that the machine is empty: its prompt is computed beside
    the rows that run, in steps as large as the policy allows, and its tokens come at their pace.
    """
    if not forecast.is_sound:
        return False
    end_due = end_due_s(request)
    has_first = request.metrics.first_token_s is not None
    if end_due == math.inf and (request.ttft_target_s is None or has_first):
        return False
    missing = request.num_tokens - request.num_computed_tokens
    prefill_s = max(forecast.prefill_s(missing), forecast.alone_prefill_s(missing))
    first_s = now_s + prefill_s
    is_first_due = not has_first and request.ttft_target_s is not None
    if is_first_due and first_s > request.arrival_s + (request.ttft_target_s or 0.0):
        return True
    if end_due == math.inf:
        return False
    remaining = forecast.remaining_tokens(request, CAUTIOUS)
    return first_s + (remaining - 1) * forecast.step_s > end_due
