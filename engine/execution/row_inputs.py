"""What a row's vocabulary-sized state is made of: a few numbers, where the state itself is wide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octavo.engine.request import Request


class RowInputs(NamedTuple):
    """Arguments of `logits_row`, which says what they mean."""

    prompt: Sequence[int]
    output: Sequence[int]
    logit_bias: Mapping[int, float] | None
    allowed: Sequence[int] | None
    bad_words: Sequence[Sequence[int]]


def row_inputs(request: Request) -> RowInputs:
    """Those of a request's row."""
    params = request.sampling_params
    return RowInputs(
        prompt=request.prompt_token_ids,
        output=request.output_token_ids,
        logit_bias=params.logit_bias,
        allowed=params.allowed_token_ids,
        bad_words=request.bad_word_token_ids,
    )
