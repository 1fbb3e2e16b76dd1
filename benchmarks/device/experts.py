"""Routed experts on the device: the kernel against the ragged products, and what each takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device.roofs import in_loop

SHAPES = {
    # Experts, chosen, hidden, width, biases, limit of gates.
    "Qwen3-30B-A3B": (128, 8, 2048, 768, False, None),
    "gpt-oss-20b": (32, 4, 2880, 2880, True, 7.0),
    "DeepSeek-V3, 32 of its experts": (32, 8, 7168, 2048, False, None),
}
TINY = {"tiny": (8, 2, 128, 64, True, 7.0)}
TOKENS = (1, 8, 64, 256, 2048)
SPREADS = ("even", "skewed", "one", "dead")
TOLERANCE = 2e-2
"""Of bfloat16 sums of order 1, relative to the largest."""


def measure(
    results: dict[str, Any], deadline_s: float, *, backend: str, dtype: str, tiny: bool
) -> Iterator[dict[str, Any]]:
    """Agreement of the device's way with the ragged one; then times beside both floors."""
    del backend
    from octavo.pallas_kernels.routed_experts import backend_for

    device = jax.devices()[0]
    own = backend_for(device.platform, device.device_kind)
    for name, (num, k, hidden, width, *_) in (TINY if tiny else SHAPES).items():
        for tokens in (3, 20) if tiny else TOKENS:
            if time.monotonic() > deadline_s:
                return
            ways = {}
            for way in dict.fromkeys((own, "ragged")):
                run, make = program(name, tokens, way, dtype)
                ways[way] = jax.jit(run)
            x, _, share, weights = make()
            worst = 0.0
            for spread in SPREADS:
                inputs = x, jnp.asarray(choices(tokens, k, num, spread)), share, weights
                got, want = (ways[way](*inputs).astype(jnp.float32) for way in (own, "ragged"))
                off = float(jnp.abs(got - want).max() / jnp.abs(want).max())
                again = all(bool((ways[own](*inputs) == got).all()) for _ in range(3))
                worst = max(worst, off if again else float("inf"))
            row: dict[str, Any] = {"what": f"{name}, {tokens} tokens, {own}"}
            row |= {"worst": worst, "ok": worst < TOLERANCE}
            chosen = choices(tokens, k, num, "even")
            per_expert = 3 * hidden * width
            num_bytes = len(np.unique(chosen)) * per_expert * x.dtype.itemsize
            floor_s = num_bytes / results["copy_bytes_per_s"]
            floor_s += 2 * tokens * k * per_expert / results["matmul_flops_per_s"]
            for way, run in ways.items():

                def body(x: jax.Array, *rest: Any, run: Any = run) -> jax.Array:
                    return x + run(x, *rest) * 1e-3

                count = 2 if tokens > 256 else 20
                took_s = in_loop(body, x, jnp.asarray(chosen), share, weights, count=count)
                row[f"{way} µs"] = 1e6 * took_s
            yield row | {
                "both floors µs": 1e6 * floor_s,
                "of floors": 1e6 * floor_s / row[f"{own} µs"],
            }


def program(
    name: str, tokens: int, way: Any, dtype: str
) -> tuple[Callable[..., jax.Array], Callable[[], Any]]:
    """A shape's product by one way, and what makes its inputs: rows, choices, shares, weights."""
    from octavo.models.blocks.experts import Gate
    from octavo.pallas_kernels.routed_experts import ExpertWeights, routed_experts

    num, k, hidden, width, has_bias, limit = (SHAPES | TINY)[name]
    shapes = {"gate": (num, hidden, width), "up": (num, hidden, width)}
    shapes |= {"down": (num, width, hidden)}
    if has_bias:
        shapes |= {"gate_bias": (num, width), "up_bias": (num, width), "down_bias": (num, hidden)}

    def make() -> Any:
        keys = iter(jax.random.split(jax.random.key(0), 8))
        stacks = {
            name: jax.random.normal(next(keys), shape, jnp.dtype(dtype)) / shape[-2] ** 0.5
            for name, shape in shapes.items()
        }
        x = jax.random.normal(jax.random.key(tokens), (tokens, hidden), jnp.dtype(dtype))
        chosen = jnp.asarray(choices(tokens, k, num, "even"))
        return x, chosen, jnp.full((tokens, k), 1 / k, jnp.float32), ExpertWeights(**stacks)

    return partial(routed_experts, gated=Gate("silu", limit), backend=way), make


def choices(tokens: int, k: int, num: int, spread: str) -> np.ndarray:
    """Experts [T, K]: by chance, the first ones mostly, few of them, or a third of no expert's."""
    rng = np.random.default_rng(tokens)
    odds = 1 / np.arange(1, num + 1) if spread == "skewed" else np.ones(num)
    if spread == "one":
        odds[k:] = 1e-9
    ranks = np.log(odds) + rng.gumbel(size=(tokens, num))
    chosen = np.argsort(-ranks, axis=1)[:, :k].astype(np.int32)
    if spread == "dead":
        chosen = np.where(rng.random((tokens, 1)) < 1 / 3, -1, chosen)
    return chosen.astype(np.int32)
