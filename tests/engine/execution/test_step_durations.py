"""What a step took is known, also where the device computes within the call that starts it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import pytest

from octavo.engine.sampling_params import SamplingParams

STEP_S = 0.03


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_is_computed_within_the_call_counts(
    make_llm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    llm = make_llm(overlap=overlap, num_decode_steps=1)
    executor = llm.engine.executor
    get, result, found = executor.programs.get, executor.result, list[float]()

    def slow(shape: Any) -> Callable[..., Any]:
        program = get(shape)

        def call(*args: Any) -> Any:
            time.sleep(STEP_S)
            return jax.block_until_ready(program(*args))

        return call

    def timed(handle: Any) -> Any:
        found.append((step := result(handle)).duration_s)
        return step

    monkeypatch.setattr(executor.programs, "get", slow)
    monkeypatch.setattr(executor, "result", timed)
    llm.generate(["a prompt"], SamplingParams(max_tokens=6, ignore_eos=True), use_tqdm=False)
    # With overlap, a step of which nothing is left when it is read may be one that had stopped.
    assert len(found) >= 6
    assert min(found[:6]) >= STEP_S
