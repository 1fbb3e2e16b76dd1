"""What one commit changed for one request."""

from __future__ import annotations

from typing import NamedTuple

from octavo.engine.request import Request
from octavo.engine.scheduler.step_plan import TokenScore


class Committed(NamedTuple):
    """News of a request, to be told to whoever waits for it.

    Attributes:
        request: the request, already brought up to date.
        new_token_ids: tokens appended, in order; a stop token is its last one.
        logprobs: one entry a new token, if asked for.
        prompt_logprobs: the next prompt tokens' entries (never for the first token, and none
            twice), if asked for.
        finished: whether this is its terminal event.
    """

    request: Request
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenScore, ...] | None
    prompt_logprobs: tuple[TokenScore, ...] | None
    finished: bool
