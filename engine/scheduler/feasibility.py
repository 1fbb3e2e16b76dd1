"""What can never fit is refused at the door, not found out in the middle."""

from __future__ import annotations

from octavo.engine.errors import InvalidRequestError
from octavo.engine.request import Request
from octavo.engine.scheduler.step_plan import StepLimits


def num_peak_pages(request: Request, page_size: int) -> int:
    """Pages it holds at its length limit. The last token's KV is never written."""
    return -(-(request.max_total_tokens - 1) // page_size)


def check_can_ever_fit(
    request: Request, limits: StepLimits, *, enable_chunked_prefill: bool
) -> None:
    """Refuses a request that the engine could not finish even alone.

    Raises:
        InvalidRequestError: names the field, its value and the limit.
    """
    num_prompt, limit = request.num_prompt_tokens, limits.max_model_len
    if num_prompt >= limit:
        raise InvalidRequestError(
            "prompt_token_ids", f"{num_prompt} tokens", f"at most max_model_len - 1 = {limit - 1}"
        )
    if request.max_total_tokens > limit:
        raise InvalidRequestError(
            "max_tokens",
            request.max_tokens,
            f"at most {limit - num_prompt} with a prompt of {num_prompt} tokens "
            f"(max_model_len = {limit})",
        )
    num_pages = min(limits.num_pages - 1, limits.max_pages_per_seq)
    if num_peak_pages(request, limits.page_size) > num_pages:
        raise InvalidRequestError(
            "max_tokens",
            request.max_tokens,
            f"prompt and output of at most {num_pages * limits.page_size + 1} tokens together: "
            f"a sequence can hold {num_pages} KV pages of {limits.page_size} tokens",
        )
    if not enable_chunked_prefill and num_prompt > limits.max_num_batched_tokens:
        raise InvalidRequestError(
            "prompt_token_ids",
            f"{num_prompt} tokens",
            f"at most max_num_batched_tokens = {limits.max_num_batched_tokens} "
            "while chunked prefill is off",
        )
