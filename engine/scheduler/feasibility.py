"""Whether a request can be served: whether it ever fits, and whether it can still be in time."""

from __future__ import annotations

import math
from typing import NamedTuple

from octavo.engine.errors import InvalidRequestError
from octavo.engine.request import Request
from octavo.engine.scheduler.deadlines import end_due_s, first_due_s
from octavo.engine.scheduler.forecast import CAUTIOUS, Forecast
from octavo.engine.scheduler.step_plan import StepLimits


def check_can_ever_fit(
    request: Request, limits: StepLimits, *, enable_chunked_prefill: bool
) -> None:
    """Refuses a request that the engine could not finish even alone.

    Raises:
        InvalidRequestError: names the field, its value and the limit.
    """
    num_prompt, limit = request.num_prompt_tokens, limits.max_model_len
    room = 0 if request.pooling is not None else 1  # for what it generates
    if num_prompt > limit - room:
        allowed = f"at most max_model_len - {room} = {limit - room}"
        raise InvalidRequestError("prompt_token_ids", f"{num_prompt} tokens", allowed)
    if request.pooling is None and request.max_total_tokens > limit:
        raise InvalidRequestError(
            "max_tokens",
            request.max_tokens,
            f"at most {limit - num_prompt} with a prompt of {num_prompt} tokens "
            f"(max_model_len = {limit})",
        )
    # The last token's KV is never written. A preempted request may be computed again at any length.
    most = limits.needs.most_tokens(limits.num_pages - 1, limits.max_pages_per_seq)
    if request.max_total_tokens - 1 > most:
        num_pages = limits.needs.to_compute(most)
        raise InvalidRequestError(
            "max_tokens",
            request.max_tokens,
            f"prompt and output of at most {most + 1} tokens together: "
            f"a sequence can hold {num_pages} KV pages of {limits.page_size} tokens",
        )
    if not enable_chunked_prefill and num_prompt > limits.max_num_batched_tokens:
        raise InvalidRequestError(
            "prompt_token_ids",
            f"{num_prompt} tokens",
            f"at most max_num_batched_tokens = {limits.max_num_batched_tokens} "
            "while chunked prefill is off",
        )


def is_hopeless(
    request: Request, now_s: float, forecast: Forecast, starts_s: float | None = None
) -> bool:
    """Whether a request that has no token yet, or waits, will miss a target whatever is done.

    That is, even if it were served alone, and each step took no more than the low quantile says
    (`StepErrors`); for its last token the cautious quantile of its remaining length is taken, so
    that it would be so even when it turns out short.

    Args:
        starts_s: when the device is expected to be done with what was dispatched; None for now.
    """
    if not forecast.is_sound:
        return False
    latest_s = latest_prefill_s(request, now_s, forecast)
    if latest_s == math.inf:
        return False
    begin_s = now_s
    if starts_s is not None and starts_s > now_s:
        begin_s += forecast.step_time.least_share(now_s, is_prefill=True) * (starts_s - now_s)
    return begin_s + forecast.least_prefill_s(request.num_missing_tokens, now_s) > latest_s


def latest_prefill_s(request: Request, now_s: float, forecast: Forecast) -> float:
    """When its prompt must be computed for it to be in time, by the low quantile of what its
    decoding takes; infinity if nothing was promised."""
    latest_s = end_due_s(request)
    if latest_s < math.inf:
        remaining = forecast.remaining_tokens(request, CAUTIOUS)
        latest_s -= (remaining - 1) * forecast.least_step_s(now_s)
    return min(latest_s, first_due_s(request))


def prefill_due_s(request: Request, forecast: Forecast) -> float:
    """When a waiting request's prompt must be computed for all its targets to be met."""
    due_s, end_s = first_due_s(request), end_due_s(request)
    if end_s < math.inf:
        remaining = forecast.remaining_tokens(request, CAUTIOUS)
        due_s = min(due_s, end_s - (remaining - 1) * forecast.step_s)
    return due_s


class UnattainableTarget(NamedTuple):
    """A target below what an idle machine takes.

    Attributes:
        field: the target's name in `Request`.
        least_s: the smallest target that an idle machine would meet, in seconds.
    """

    field: str
    least_s: float


def find_unattainable(request: Request, forecast: Forecast) -> UnattainableTarget | None:
    """The target of a new request that an idle machine could not meet, by the best that was
    measured; None if it could meet each."""
    first_s = forecast.best_prefill_s(request.num_missing_tokens)
    if request.ttft_target_s is not None and first_s > request.ttft_target_s:
        return UnattainableTarget("ttft_target_s", first_s)
    if request.e2e_target_s is not None:
        remaining = forecast.remaining_tokens(request, CAUTIOUS)
        last_s = first_s + (remaining - 1) * forecast.best_step_s
        if last_s > request.e2e_target_s:
            return UnattainableTarget("e2e_target_s", last_s)
    return None


def spare_s(request: Request, forecast: Forecast) -> float:
    """Seconds that a request could wait if it came now and would still be in time; infinity if
    nothing was promised, below 0 if it could not be in time at all."""
    spare, prefill_s = math.inf, forecast.alone_prefill_s(request.num_missing_tokens)
    if request.ttft_target_s is not None:
        spare = request.ttft_target_s - prefill_s
    if request.e2e_target_s is not None:
        remaining = forecast.remaining_tokens(request, CAUTIOUS)
        spare = min(
            spare, request.e2e_target_s - prefill_s - (remaining - 1) * forecast.alone_step_s
        )
    return spare


def will_be_late(request: Request, now_s: float, forecast: Forecast) -> bool:
    """Whether a request that is served next will miss a target at the speed of the present load.

    Unlike `is_hopeless` it does not grant that the machine is empty: its prompt is computed beside
    the rows that run, in steps as large as the policy allows, and its tokens come at their pace;
    all of that at the low quantile of what steps take, too.
    """
    if not forecast.is_sound:
        return False
    end_due = end_due_s(request)
    has_first = request.metrics.first_token_s is not None
    if end_due == math.inf and (request.ttft_target_s is None or has_first):
        return False
    missing = request.num_missing_tokens
    prefill_s = max(forecast.prefill_s(missing), forecast.alone_prefill_s(missing))
    first_s = now_s + prefill_s * forecast.step_time.least_share(now_s, is_prefill=True)
    is_first_due = not has_first and request.ttft_target_s is not None
    if is_first_due and first_s > request.arrival_s + (request.ttft_target_s or 0.0):
        return True
    if end_due == math.inf:
        return False
    remaining = forecast.remaining_tokens(request, CAUTIOUS)
    step_s = forecast.step_s * forecast.step_time.least_share(now_s, is_prefill=False)
    return first_s + (remaining - 1) * step_s > end_due
