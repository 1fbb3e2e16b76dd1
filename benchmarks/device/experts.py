"""Routed experts on the device: the kernel against the ragged products, and what each takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
TOLERANCE = 2e-2
"""Of bfloat16 sums of order 1, relative to the largest."""


def measure(
    results: dict[str, Any], deadline_s: float, *, backend: str, dtype: str, tiny: bool
) -> Iterator[dict[str, Any]]:
    """Agreement with float32 for even, skewed and lonely choices; then times beside both floors."""
    del backend
    from octavo.models.blocks.experts import Gate
    from octavo.pallas_kernels.routed_experts import ExpertWeights, backend_for, routed_experts

    device = jax.devices()[0]
    own = backend_for(device.platform, device.device_kind)
    for name, (num, k, hidden, width, has_bias, limit) in (TINY if tiny else SHAPES).items():
        keys = iter(jax.random.split(jax.random.key(0), 8))

        def normal(*shape: int, keys: Any = keys) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.dtype(dtype)) / shape[-2] ** 0.5

        stacks = {"gate": (num, hidden, width), "up": (num, hidden, width)}
        stacks |= {"down": (num, width, hidden)}
        if has_bias:
            stacks |= {"gate_bias": (num, width), "up_bias": (num, width)}
            stacks |= {"down_bias": (num, hidden)}
        weights = ExpertWeights(**{name: normal(*shape) for name, shape in stacks.items()})
        gate = Gate("silu", limit)
        for tokens in (3, 20) if tiny else TOKENS:
            if time.monotonic() > deadline_s:
                return
            x = normal(tokens, hidden, keys=iter([jax.random.key(tokens)])) * tokens**0.5
            share = jnp.full((tokens, k), 1 / k, jnp.float32)
            ways = {way: jax.jit(partial(routed_experts, gated=gate, backend=way))
                    for way in dict.fromkeys((own, "ragged"))}  # fmt: skip
            row: dict[str, Any] = {"what": f"{name}, {tokens} tokens, {own}"}
            worst = 0.0
            for spread in ("even", "skewed", "one", "dead"):
                chosen = jnp.asarray(choices(tokens, k, num, spread))
                got = ways[own](x, chosen, share, weights)
                same = all(
                    bool((ways[own](x, chosen, share, weights) == got).all()) for _ in range(3)
                )
                want = ways["ragged"](x, chosen, share, weights).astype(jnp.float32)
                off = jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want).max()
                worst = max(worst, float(off) if same else float("inf"))
            row |= {"worst": worst, "ok": worst < TOLERANCE}
            chosen = jnp.asarray(choices(tokens, k, num, "even"))
            used = len(np.unique(np.asarray(chosen)))
            per_expert = 3 * hidden * width
            floor_s = used * per_expert * x.dtype.itemsize / results["copy_bytes_per_s"]
            floor_s += 2 * tokens * k * per_expert / results["matmul_flops_per_s"]
            for way, run in ways.items():

                def body(x: jax.Array, *rest: Any, run: Any = run) -> jax.Array:
                    return x + run(x, *rest) * 1e-3

                took_s = in_loop(body, x, chosen, share, weights, count=2 if tokens > 256 else 20)
                row[f"{way} µs"] = 1e6 * took_s
            row |= {"both floors µs": 1e6 * floor_s, "of floors": 1e6 * floor_s / row[f"{own} µs"]}
            yield row


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
