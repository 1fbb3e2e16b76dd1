"""Numbers at the ends of their ranges: a device holds float32, which has fewer than Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import MAX_REPETITION_PENALTY, SamplingParams

PROMPT = [66, 67, 68, 66, 67, 68]
TINY, LEAST = 1e-300, 5e-324
"""Both are 0 in float32."""

EXTREMES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": TINY},
    "temperature, top_k": {"temperature": LEAST, "top_k": 1},
    "temperature, top_p": {"temperature": 1e-40, "top_p": 0.5},
    "top_p": {"top_p": TINY},
    "top_p, min_p": {"top_p": LEAST, "min_p": 1.0},
    "min_p": {"min_p": TINY},
    "strongest repetition_penalty": {"repetition_penalty": MAX_REPETITION_PENALTY},
    "weakest repetition_penalty": {"repetition_penalty": 1 / MAX_REPETITION_PENALTY},
    "all penalties": {
        "repetition_penalty": MAX_REPETITION_PENALTY,
        "presence_penalty": -2.0,
        "frequency_penalty": 2.0,
        "logit_bias": {66: 100.0, 67: -100.0},
        "temperature": TINY,
    },
}


def test_the_ends_of_ranges_are_served_beside_others(make_llm: Callable[..., Any]) -> None:
    llm = make_llm()
    params = [
        SamplingParams(**{"seed": 3, "max_tokens": 6, "ignore_eos": True, **extreme})
        for extreme in EXTREMES.values()
    ]
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    alone = llm.generate(PROMPT, plain, use_tqdm=False)[0].outputs[0].token_ids
    outputs = llm.generate([PROMPT] * (len(params) + 1), [*params, plain], use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6] * len(outputs)
    assert outputs[-1].outputs[0].token_ids == alone
    # A temperature of almost nothing leaves nothing but the likeliest token.
    assert outputs[0].outputs[0].token_ids == alone
    assert llm.engine.core.recovery.num_recoveries == 0


@pytest.mark.parametrize("penalty", [1e-300, 1e300, 1.01 * MAX_REPETITION_PENALTY])
def test_a_repetition_penalty_that_would_overflow_is_refused(penalty: float) -> None:
    with pytest.raises(InvalidRequestError, match="repetition_penalty"):
        SamplingParams(repetition_penalty=penalty)
