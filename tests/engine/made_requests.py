"""Requests as the scheduler takes them, with nothing in them but what a test needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams


def make_request(
    request_id: str = "a",
    prompt: int | list[int] = 8,
    max_tokens: int = 4,
    *,
    seed: int = 1,
    eos: Iterable[int] = (),
    arrival_s: float = 0.0,
    params: dict[str, Any] | None = None,
    **fields: Any,
) -> Request:
    """A request with `prompt` tokens (or a prompt of that many), which nothing stops early."""
    return Request(
        request_id=request_id,
        prompt_token_ids=list(range(prompt)) if isinstance(prompt, int) else prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, **(params or {})),
        seed=seed,
        eos_token_ids=tuple(eos),
        max_tokens=max_tokens,
        arrival_s=arrival_s,
        **fields,
    )
