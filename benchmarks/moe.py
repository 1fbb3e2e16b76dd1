"""Routed experts on this machine: each way to multiply by them, beside the least there could be.

    taskset -c 0 python -m benchmarks.moe [--tokens 128 32 1] [--way tiles ragged] [--json]

What a way takes is set against one dense product of as many rows (the arithmetic alone, with one
expert's weights in the caches) and against reading the bytes of the chosen experts once, whichever
is longer. Choices are even (by chance), skewed (the third most popular expert gets a third of what
the first gets), or of a quarter of the experts alone.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.machine import about_machine
from octavo.pallas_kernels.compat import WIDE_VECTORS, compile_lowered
from octavo.pallas_kernels.routed_experts import ExpertWeights, routed_experts
from octavo.pallas_kernels.routed_experts.reference import one_expert
from octavo.pallas_kernels.routed_experts.tiles import tile_rows, tiled_experts

SPREADS = ("even", "skewed", "a quarter")
SLOW_S = 3.0
"""A way that takes longer is timed once."""


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """A gated MLP's."""
    return jax.nn.silu(gate) * up


def choices(rng: np.random.Generator, args: argparse.Namespace, tokens: int, spread: str) -> Any:
    """Experts of each token [T, K]."""
    odds = np.ones(args.experts)
    if spread == "skewed":
        odds = 1 / np.arange(1, args.experts + 1)
    elif spread == "a quarter":
        odds[max(args.experts // 4, args.chosen) :] = 1e-9
    ranks = np.log(odds) + rng.gumbel(size=(tokens, args.experts))
    return np.argsort(-ranks, axis=1)[:, : args.chosen].astype(np.int32)


def best_ms(run: Callable[[], Any], rounds: int) -> float:
    """The shortest of some runs, after one that is not counted."""
    run()
    times: list[float] = []
    while len(times) < rounds and (not times or times[0] < 1000 * SLOW_S):
        start = time.perf_counter()
        run()
        times.append(1000 * (time.perf_counter() - start))
    return min(times)


def timed(function: Callable[..., jax.Array], rounds: int, *arrays: Any) -> float:
    """Of a compiled function, with vectors as wide as there are."""
    lowered = jax.jit(function).lower(*arrays)
    program = compile_lowered(lowered, WIDE_VECTORS if jax.default_backend() == "cpu" else None)
    return best_ms(lambda: jax.block_until_ready(program(*arrays)), rounds)


def read_ms(weights: ExpertWeights, chosen: Any, rounds: int) -> float:
    """Reading each chosen expert's weights once, and adding them up by columns."""
    stacks = [np.asarray(leaf) for leaf in jax.tree.leaves(weights)]
    experts = np.unique(chosen)

    def run() -> None:
        for expert in experts:
            for stack in stacks:
                stack[expert].sum(axis=0)

    return best_ms(run, rounds)


def measured(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of tokens and spread of choices."""
    rng = np.random.default_rng(0)
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, width, experts = args.hidden, args.width, args.experts
    weights = ExpertWeights(
        gate=jax.random.normal(keys[0], (experts, hidden, width)) * 0.02,
        up=jax.random.normal(keys[1], (experts, hidden, width)) * 0.02,
        down=jax.random.normal(keys[2], (experts, width, hidden)) * 0.02,
    )
    ways: dict[str, Callable[..., jax.Array]] = {
        name: partial(routed_experts, gated=gated, backend=name) for name in args.way
    }
    ways |= {f"tiles of {n}": partial(tiled_experts, gated=gated, rows=n) for n in args.rows}
    rows = []
    for tokens in args.tokens:
        x = jax.random.normal(keys[3], (tokens, hidden))
        one = weights.of(jnp.int32(0))
        repeated = jnp.tile(x, (args.chosen, 1))
        dense = timed(partial(one_expert, gated=gated), args.rounds, repeated, one)
        for spread in args.spread:
            chosen = choices(rng, args, tokens, spread)
            share = np.full(chosen.shape, 1 / args.chosen, np.float32)
            row: dict[str, Any] = {
                "tokens": tokens,
                "choices": spread,
                "experts in use": len(np.unique(chosen)),
                "largest": int(np.bincount(chosen.reshape(-1)).max()),
                "tile": tile_rows(chosen.size, experts),
                "dense ms": dense,
                "read ms": read_ms(weights, chosen, args.rounds),
            }
            for name, way in ways.items():
                row[f"{name} ms"] = timed(way, args.rounds, x, chosen, share, weights)
            rows.append(row)
            print(json.dumps(row) if args.json else _line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--chosen", type=int, default=8, help="experts a token")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 32, 1])
    parser.add_argument("--spread", nargs="+", choices=SPREADS, default=list(SPREADS))
    parser.add_argument("--way", nargs="*", default=["tiles"], help="tiles, ragged, reference")
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="tiles of so many, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    about = about_machine() | {"load": round(load, 1)}
    print(json.dumps(about) if args.json else about, flush=True)
    measured(args)


if __name__ == "__main__":
    main()
