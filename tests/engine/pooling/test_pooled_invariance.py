"""In float32, an embedding does not depend on how its request was served, nor do the tokens of
requests beside it: alone, batched, chunked anywhere, preempted, recovered."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.input.input_processor import POOLED
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.policies import POLICIES
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policy import Policy

TOLERANCE = 1e-5
"""Of each number of a vector of length 1: what the order of sums in float32 leaves."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True)
KINDS: dict[str, PoolingParams | SamplingParams] = {
    "last": PoolingParams(pooling="last"),
    "mean": PoolingParams(pooling="mean"),
    "cls": PoolingParams(pooling="cls"),
    "raw mean of ten": PoolingParams(pooling="mean", normalize=False, dimensions=10),
    "greedy": GREEDY,
    "sampled": SAMPLED,
}
MAX_TURNS = 3000


def _prompts() -> list[list[int]]:
    """Prompts of 1 to 240 tokens; some share a beginning, some are one."""
    rng = random.Random(3)
    shared = [rng.randrange(16, 272) for _ in range(100)]
    own = [[rng.randrange(16, 272) for _ in range(size)] for size in (1, 15, 16, 17, 70, 240)]
    return [*own, shared, shared[:48], [*shared[:64], *own[4]], shared[:64]]


PROMPTS = _prompts()


@dataclass
class Told:
    """What the policy and the faults of the engine under test do."""

    budget: int = 64
    swaps: bool = True
    fault: str | None = None


class Faults:
    """The executor, but that a step fails where it is told to."""

    def __init__(self, inner: Any, told: Told) -> None:
        self._inner = inner
        self._told = told

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, plan: Any) -> Any:
        self._fail("dispatch")
        return self._inner.dispatch(plan)

    def result(self, handle: Any) -> Any:
        self._fail("result")
        return self._inner.result(handle)

    def _fail(self, stage: str) -> None:
        if self._told.fault == stage:
            self._told.fault = None
            raise RuntimeError("out of memory")


@pytest.fixture(scope="module")
def built(tiny_model: Path) -> Iterator[tuple[Any, Told]]:
    """An engine for both kinds of request, whose pool a few of them outgrow."""
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    told = Told()

    def make(parameters: Parameters) -> Policy:
        return dataclasses.replace(
            POLICIES["fcfs"](parameters),
            budget=lambda snapshot: told.budget,
            swap_or_recompute=lambda *_: told.swaps,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "fcfs-told", make)
        engine = Engine(
            EngineConfig(
                model=str(tiny_model), task="both", max_num_seqs=6, max_num_batched_tokens=64,
                num_kv_pages=20, block_size=16, host_kv_memory_bytes=1 << 20, warm_up="coarse",
                fail_on_compile=True, scheduling_policy="fcfs-told",
            )
        )  # fmt: skip
    engine.executor = engine.core.executor = Faults(engine.executor, told)  # type: ignore[assignment]
    yield engine, told
    engine.close()


def submit(engine: Any, prompt: list[int], kind: str) -> str:
    params = KINDS[kind]
    is_pooled = isinstance(params, PoolingParams)
    submission = engine.inputs.process(
        None,
        prompt,
        POOLED if is_pooled else params,
        now_s=engine.clock.now_s(),
        pooling=params if is_pooled else None,
    )
    engine.submit(submission)
    return str(submission.request_id)


def answer(output: Any) -> Any:
    assert output.error is None, output.error
    return output.outputs[0].token_ids if output.pooled is None else output.pooled


@pytest.fixture(scope="module")
def want(
    built: tuple[Any, Told],
    tiny_model: Path,
    plain: Callable[..., Any],
    pooled: Callable[..., Any],
) -> dict[tuple[int, str], Any]:
    """Vectors by a plain computation of the whole text; tokens of each request alone."""
    engine, told = built
    hidden, found = plain(tiny_model), dict[tuple[int, str], Any]()
    for place, prompt in enumerate(PROMPTS):
        states = hidden(prompt)
        for kind, params in KINDS.items():
            if isinstance(params, PoolingParams):
                vector = pooled(states, params.pooling, params.normalize is not False)
                found[place, kind] = vector[: params.dimensions]
                continue
            submit(engine, prompt, kind)
            outputs = []
            while engine.has_unfinished:
                outputs += engine.step()
            found[place, kind] = answer(outputs[-1])
            engine.flush_prefix_cache()
    assert told.budget == 64
    return found


jobs = st.lists(
    st.tuples(st.integers(0, len(PROMPTS) - 1), st.sampled_from(sorted(KINDS)), st.integers(0, 8)),
    min_size=3,
    max_size=14,
)
seen: Counter[str] = Counter()


@given(
    jobs=jobs,
    budget=st.integers(1, 64),
    swaps=st.booleans(),
    overlap=st.booleans(),
    fault=st.none() | st.tuples(st.sampled_from(["dispatch", "result"]), st.integers(0, 30)),
    keeps_cache=st.booleans(),
)
def test_every_request_gets_what_it_gets_alone(
    built: tuple[Any, Told],
    want: dict[tuple[int, str], Any],
    jobs: list[tuple[int, str, int]],
    budget: int,
    swaps: bool,
    overlap: bool,
    fault: tuple[str, int] | None,
    keeps_cache: bool,
) -> None:
    engine, told = built
    told.budget, told.swaps = budget, swaps
    engine.core._max_in_flight = 2 if overlap else 1
    if not keeps_cache:
        engine.flush_prefix_cache()
    before = engine.scheduler.load()
    waiting = sorted(jobs, key=lambda job: job[2])
    asked: dict[str, tuple[int, str]] = {}
    found: dict[str, Any] = {}
    for turn in range(MAX_TURNS):
        while waiting and waiting[0][2] <= turn:
            place, kind, _ = waiting.pop(0)
            asked[submit(engine, PROMPTS[place], kind)] = place, kind
        if fault is not None and fault[1] == turn:
            told.fault = fault[0]
        for output in engine.step():
            if output.finished:
                assert output.engine_id not in found
                found[output.engine_id] = answer(output)
                params = KINDS[asked[output.engine_id][1]]
                if isinstance(params, PoolingParams):
                    seen["preempted"] += output.metrics.num_preemptions > 0
                    seen["cached"] += output.num_cached_tokens > 0
                    assert not (params.needs_every_token and output.num_cached_tokens)
        if not waiting and not engine.has_unfinished:
            break
    told.fault = None
    engine.check_integrity()
    assert found.keys() == asked.keys()
    for request_id, key in asked.items():
        if isinstance(KINDS[key[1]], PoolingParams):
            np.testing.assert_allclose(found[request_id], want[key], rtol=0, atol=TOLERANCE)
        else:
            assert found[request_id] == want[key], key
    after = engine.scheduler.load()
    seen["swapped"] += after.num_swaps > before.num_swaps
    seen["recomputed"] += after.num_recomputes > before.num_recomputes


def test_the_examples_had_what_they_are_about(built: tuple[Any, Told]) -> None:
    engine, _ = built
    assert all(seen[name] for name in ("preempted", "cached", "swapped", "recomputed")), seen
    assert engine.core.recovery.num_recoveries > 0
    assert engine.core.num_bugs == 0


@pytest.mark.parametrize("swaps", [True, False])
@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
def test_a_request_that_loses_its_pages_on_the_way_gets_the_same(
    built: tuple[Any, Told], want: dict[tuple[int, str], Any], kind: str, swaps: bool
) -> None:
    engine, told = built
    told.budget, told.swaps = 8, swaps
    engine.flush_prefix_cache()
    for place in (2, 3, 4):  # their rows grow, and the pool is too small
        submit(engine, PROMPTS[place], "greedy")
    for _ in range(16):
        engine.step()
    request_id = submit(engine, PROMPTS[6], kind)
    before, found = engine.scheduler.load(), {}
    while engine.has_unfinished:
        found |= {output.engine_id: output for output in engine.step()}
    after = engine.scheduler.load()
    assert found[request_id].metrics.num_preemptions > 0
    assert (after.num_swaps > before.num_swaps) == swaps
    vector = answer(found[request_id])
    np.testing.assert_allclose(vector, want[6, kind], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("size", range(1, 65))
def test_a_chunk_may_end_anywhere(
    built: tuple[Any, Told], want: dict[tuple[int, str], Any], size: int
) -> None:
    engine, told = built
    told.budget = size
    asked = {submit(engine, PROMPTS[8], kind): kind for kind in ("last", "mean", "cls")}
    found = {}
    while engine.has_unfinished:
        found |= {output.engine_id: answer(output) for output in engine.step()}
    for request_id, kind in asked.items():
        np.testing.assert_allclose(found[request_id], want[8, kind], rtol=0, atol=TOLERANCE)
