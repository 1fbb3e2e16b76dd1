"""Choosing tokens from whole vocabularies: what sampled rows cost beside greedy ones, and where."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.device.hot_kernels import hottest
from benchmarks.device.roofs import seconds

KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
}


def measure(
    results: dict[str, Any], deadline_s: float, *, backend: Any, dtype: str, tiny: bool
) -> Iterator[dict[str, Any]]:
    """`sample` alone in the general variant, compiled as steps are; then its hottest kernels."""
    del results, deadline_s, backend, dtype
    from octavo.engine.execution.sampling.logits import LogitsState, SamplingRows
    from octavo.engine.execution.sampling.sampler import sample
    from octavo.pallas_kernels.compat import compile_lowered, graph_compiler_options

    num_rows, vocab_size = (4, 1024) if tiny else (64, 128_256)
    logits = 3.0 * jax.random.normal(jax.random.key(0), (num_rows, vocab_size), jnp.float32)
    slots = jnp.arange(num_rows, dtype=jnp.int32)
    state = LogitsState.init(num_rows, vocab_size)
    active = jnp.ones((num_rows,), bool)
    rows = SamplingRows.init(num_rows)
    lowered = jax.jit(sample).lower(logits, rows, slots, state, slots, active)
    for where, options in (("host", None), ("graph", graph_compiler_options())):
        program = compile_lowered(lowered, options)
        for name, given in KINDS.items():
            asked = {key: jnp.full_like(getattr(rows, key), value) for key, value in given.items()}
            inputs = logits, dataclasses.replace(rows, **asked), slots, state, slots, active

            def run(program: Any = program, inputs: Any = inputs) -> Any:
                return jax.block_until_ready(program(*inputs))

            yield {"what": f"{name}, branches in the {where}", "µs": 1e6 * seconds(run)}
            if where == "graph" and "top" in name:
                yield from hottest(run, per=1)
