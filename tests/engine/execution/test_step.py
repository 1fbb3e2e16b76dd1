"""The compiled step: state stays in place, and rows stop on their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.execution.executor import DeviceExecutor
from octavo.engine.execution.platform.buckets import make_lattice
from octavo.engine.execution.platform.engine_setup import EngineSetup
from octavo.engine.execution.platform.kernel_choice import Kernels
from octavo.engine.execution.state import StateLayout
from octavo.engine.execution.step import make_step
from octavo.engine.execution.step_spec import StepShape, step_spec
from octavo.engine.execution.weights.weight_variants import plain_variants
from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.step_plan import (
    DecodeRow,
    DecodeRows,
    PrefillRow,
    StepLimits,
    StepPlan,
)
from octavo.models.flat_config import flat_config
from octavo.models.parameters import abstract_weights
from octavo.models.random_weights import random_weights
from octavo.sharding.mesh import make_mesh

CONFIG = flat_config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize("shape", [StepShape(4, 4, 4), StepShape(32, 4, 0)], ids=str)
def test_a_step_never_copies_the_pool(shape: StepShape) -> None:
    """The pool grows 32 times; what the program needs beside it does not grow at all."""
    mesh = make_mesh(1)
    weights = abstract_weights(CONFIG, jnp.dtype("float32"), mesh)

    def temporary_bytes(num_pages: int) -> int:
        layout = StateLayout(
            config=CONFIG,
            mesh=mesh,
            num_slots=4,
            num_pages=num_pages,
            page_size=16,
            table_pages=8,
            dtype=jnp.dtype("float32"),
        )
        spec = step_spec(shape, 8, 16)
        step = jax.jit(
            make_step(CONFIG, spec, mesh=mesh, kernels=Kernels.for_devices(mesh, "xla")),
            donate_argnums=1,
        )
        analysis = (
            step.lower(weights, layout.abstract(), spec.abstract()).compile().memory_analysis()
        )
        return int(analysis.temp_size_in_bytes)

    assert temporary_bytes(64 * 32) == temporary_bytes(64)


@pytest.fixture(scope="module")
def executor() -> DeviceExecutor:
    mesh = make_mesh(1)
    lattice = make_lattice(
        max_num_seqs=4, max_num_batched_tokens=32, num_steps=8, variants=("general",)
    )
    limits = StepLimits(
        max_num_batched_tokens=32,
        max_num_seqs=4,
        max_num_steps=8,
        max_prefill_rows=lattice.max_prefill_rows,
        max_pages_per_seq=8,
        page_size=16,
        num_pages=33,
        max_model_len=128,
        token_edges=lattice.token_edges,
    )
    weights, kv_dtype = random_weights(CONFIG, "float32", mesh, 0), jnp.dtype("float32")
    setup = EngineSetup(
        model=CONFIG,
        mesh=mesh,
        limits=limits,
        num_slots=limits.max_num_seqs,
        lattice=lattice,
        kernels=Kernels.for_devices(mesh, "xla"),
        kv_dtype=kv_dtype,
        variants=plain_variants(weights, kv_dtype),
    )
    executor = DeviceExecutor(setup, weights, fail_on_compile=True)
    executor.warm_up()
    return executor


def start(executor: DeviceExecutor, requests: list[Request]) -> None:
    """Prefills prompts into slots 0, 1, …, with pages enough for all their tokens."""
    rows = tuple(
        PrefillRow(
            request=request,
            slot=slot,
            start=0,
            num_tokens=request.num_prompt_tokens,
            samples=True,
            is_new=True,
            page_ids=tuple(range(1 + 8 * slot, 9 + 8 * slot)),
        )
        for slot, request in enumerate(requests)
    )
    plan = StepPlan(
        step_id=0, decode_rows=DecodeRows.of(()), prefill_rows=rows, num_steps=1, page_updates=()
    )
    take(executor, plan)


def decode(executor: DeviceExecutor, requests: list[Request], num_steps: int) -> list[int]:
    """One dispatch; how many tokens each row emitted."""
    rows = [
        DecodeRow(request=r, slot=slot, start=r.num_tokens - 1, max_new_tokens=num_steps)
        for slot, r in enumerate(requests)
    ]
    plan = StepPlan(
        step_id=0,
        decode_rows=DecodeRows.of(rows),
        prefill_rows=(),
        num_steps=num_steps,
        page_updates=(),
    )
    return take(executor, plan)


def take(executor: DeviceExecutor, plan: StepPlan) -> list[int]:
    result = executor.result(executor.dispatch(plan))
    requests = [*plan.decode_rows.requests, *(row.request for row in plan.prefill_rows)]
    for request, row in zip(requests, result.rows, strict=True):
        request.output_token_ids.extend(row.token_ids)
    return [len(row.token_ids) for row in result.rows]


def make_requests(max_tokens: list[int], stops: tuple[int, ...] = ()) -> list[Request]:
    return [
        Request(
            request_id=str(index),
            prompt_token_ids=np.random.default_rng(index).integers(0, 64, 5).tolist(),
            sampling_params=SamplingParams(temperature=1.0),
            seed=index,
            eos_token_ids=stops,
            max_tokens=count,
            arrival_s=0.0,
        )
        for index, count in enumerate(max_tokens)
    ]


def test_each_row_stops_at_its_own_length_and_the_others_go_on(executor: DeviceExecutor) -> None:
    requests = make_requests([1, 3, 9, 40])
    start(executor, requests)
    assert decode(executor, requests, 8) == [0, 2, 8, 8]
    assert decode(executor, requests, 8) == [0, 0, 0, 8]
    assert [len(r.output_token_ids) for r in requests] == [1, 3, 9, 17]


def test_a_row_stops_at_a_stop_token_and_emits_it(executor: DeviceExecutor) -> None:
    free = make_requests([17, 17])
    start(executor, free)
    decode(executor, free, 8)
    stop = free[0].output_token_ids[4]
    stopping = make_requests([17, 17], (stop,))
    start(executor, stopping)
    decode(executor, stopping, 8)
    for with_stop, without in zip(stopping, free, strict=True):
        ids = without.output_token_ids
        end = ids.index(stop) + 1 if stop in ids else len(ids)
        assert with_stop.output_token_ids == ids[:end]
    assert stopping[0].output_token_ids[-1] == stop


def test_steps_in_one_dispatch_equal_steps_one_by_one(executor: DeviceExecutor) -> None:
    together, apart = make_requests([30, 30, 30]), make_requests([30, 30, 30])
    start(executor, together)
    decode(executor, together, 8)
    start(executor, apart)
    for _ in range(8):
        decode(executor, apart, 1)
    assert [r.output_token_ids for r in together] == [r.output_token_ids for r in apart]
