"""Requests of every kind that devices are told about in a way of their own."""

from __future__ import annotations

import random
from typing import Any

from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.structured.params import StructuredOutputsParams

NUM_PROMPTS = 12
FIRST, LAST_TOKEN = 16, 272


def requests() -> list[tuple[list[int], SamplingParams, int]]:
    """Prompts, parameters and priorities."""
    rng = random.Random(5)
    shared = [rng.randrange(FIRST, LAST_TOKEN) for _ in range(32)]
    kinds: list[dict[str, Any]] = [
        {},
        {"structured_outputs": StructuredOutputsParams(regex="[a-f]{3,9}(x|yz)[0-9]{20}")},
        {"logit_bias": {40: 5.0, 41: 4.5, 42: -20.0}},
        {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"allowed_token_ids": list(range(60, 200, 3))},
        {"bad_words": ["a", "bc"]},
        {"min_tokens": 9, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.8, "seed": 3, "top_p": 0.9},
    ]
    found = []
    for index in range(NUM_PROMPTS):
        own = [rng.randrange(FIRST, LAST_TOKEN) for _ in range(rng.randrange(8, 60))]
        prompt = shared + own if index % 2 else own
        params = {"temperature": 0.0, "max_tokens": 40} | kinds[index % len(kinds)]
        found.append((prompt, SamplingParams(**params), 0 if index % 5 == 4 else 3))
    return found


def serve_all(engine: Any, *, fail_at: int | None = None) -> list[list[int]]:
    """The tokens of each request, which come while others are served.

    Args:
        fail_at: a step whose result is lost.
    """
    engine.scheduler.forecast.page_copy_s = 1e-9 if engine.limits.num_host_pages else None
    if fail_at is not None:
        _lose_a_result(engine.executor, fail_at)
    found: dict[str, list[int]] = {}
    waiting = list(enumerate(requests()))
    while waiting or engine.has_unfinished:
        for index, (prompt, params, priority) in waiting[:2]:
            now_s = engine.clock.now_s()
            submission = engine.inputs.process(
                str(index), prompt, params, now_s=now_s, priority=priority
            )
            engine.submit(submission)
        del waiting[:2]
        for _ in range(3):
            for output in engine.step():
                assert output.error is None, output.error
                found[output.request_id] = list(output.outputs[0].token_ids)
    engine.check_integrity()
    assert engine.core.num_bugs == 0
    return [found[str(index)] for index in range(len(found))]


def swap_always(monkeypatch: Any = None) -> None:
    """Copies cost what they are said to, however busy the machine is."""
    for name in ("observe_copy", "observe_timed_copy"):
        put = setattr if monkeypatch is None else monkeypatch.setattr
        put(Forecast, name, lambda self, num_pages, seconds: None)


def _lose_a_result(executor: Any, fail_at: int) -> None:
    whole, calls = executor.result, []

    def result(handle: Any) -> Any:
        calls.append(handle)
        if len(calls) == fail_at:
            raise OSError("a step is lost")
        return whole(handle)

    executor.result = result
