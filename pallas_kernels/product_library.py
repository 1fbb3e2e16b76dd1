"""Which library computes a CPU's float32 products: XLA's compiler has two.

YNNPACK, which it takes unasked, and Eigen. Neither is faster everywhere: on one core of an Intel
Xeon (AVX-512) the layers of SmolLM2 take 98 ms with Eigen and 136 with YNNPACK at 64 rows, 1,430
and 1,690 at 1,024; on two cores YNNPACK shares the work better, and on one of an EPYC they were
alike. So tuning tables say which a machine has been measured to want with that many cores (`octavo
tune --part products`), and what no table knows is left to the compiler.

Eigen wants a weight's inputs first: given `[outputs, inputs]`, XLA transposes the whole weight in
every step. An output layer that is the embedding table lies so, and is kept a second time as
`[inputs, outputs]` where Eigen computes it.

Reductions stay YNNPACK's with either, and with them the products that they end: attention's decode
takes 1.6 times as long without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.compat import product_compiler_options
from octavo.pallas_kernels.sliced_linear import slice_weight, sliced_linear

ProductLibrary = tuning.ProductLibrary
"""The name of one: "ynnpack" or "eigen"."""
ROWS = (1, 4, 8, 16, 32, 48, 64, 96, 128, 512)
"""Of the steps that they are measured on."""
MARGIN = 0.03
"""A gain below it is noise on most machines."""
SLICED_MARGIN = 0.1
"""Slices take memory: a gain below it is none."""
_LAYERS = 8
"""So many that their weights do not stay in a core's cache from one step to the next."""


def choose_product_library(weights: Any, kv_dtype: Any) -> ProductLibrary:
    """The library that the steps of an engine are compiled with.

    Args:
        weights: tree of arrays or `jax.ShapeDtypeStruct`s with shardings.
        kv_dtype: of the KV pools.

    Returns:
        What was measured to be faster on as many cores of this CPU, where everything is float32;
        else "ynnpack", as XLA has it.

    Raises:
        InvalidConfigError: a tuning table cannot be read.
    """
    products = _measured(weights, kv_dtype)
    return "ynnpack" if products is None else products.library


def choose_sliced(weights: Any) -> tuple[int, int] | None:
    """The least and the most tokens of steps that multiply with sliced weights.

    Args:
        weights: tree of arrays or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
        What was measured on as many cores of this CPU, where everything is float32 on one device;
        else None, no step.

    Raises:
        InvalidConfigError: a tuning table cannot be read.
    """
    products = _measured(weights, jnp.float32)
    is_one = all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(weights))
    return products.sliced if products is not None and is_one else None


def _measured(weights: Any, kv_dtype: Any) -> tuning.Products | None:
    """What a table says of float32 products, if they are all a step computes, and on a CPU."""
    leaves = jax.tree.leaves(weights)
    device = next(iter(leaves[0].sharding.device_set))
    dtypes = {leaf.dtype for leaf in leaves} | {jnp.dtype(kv_dtype)}
    if device.platform != "cpu" or dtypes != {jnp.dtype("float32")}:
        return None
    return tuning.tuned_products("float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedProducts:
    """What came of measuring both libraries, and sliced weights.

    Attributes:
        library: the faster one; "ynnpack" where they are alike.
        sliced: the least and the most of those neighbours among `rows` with which sliced weights
            are faster than `library`; None where they are with none.
        rows: of the steps.
        ms: by library, and with "sliced" weights, milliseconds of a few layers' products, for each
            of `rows`.
    """

    library: ProductLibrary
    sliced: tuple[int, int] | None
    rows: tuple[int, ...]
    ms: dict[str, tuple[float, ...]]

    def entry(self) -> dict[str, Any]:
        """As a table holds it."""
        rounded = {f"{name}_ms": [round(ms, 3) for ms in each] for name, each in self.ms.items()}
        key = {"dtype": "float32", "num_cores": tuning.num_cores()}
        chosen = {"library": self.library, "sliced": self.sliced and list(self.sliced)}
        return {**key, **chosen, "rows": list(self.rows), **rounded}


def tune_products(
    hidden_size: int, intermediate_size: int, *, rows: tuple[int, ...] = ROWS, rounds: int = 7
) -> TunedProducts:
    """Times a few layers' products with both libraries and sliced, in turns, on the CPU.

    Args:
        hidden_size, intermediate_size: of the model.
        rows: of the steps to time.
        rounds: of each step, of which the median counts.
    """
    random = np.random.default_rng(0)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape, np.float32) * shape[0] ** -0.5)

    layers = [
        (weight(hidden_size, 2 * intermediate_size), weight(intermediate_size, hidden_size))
        for _ in range(_LAYERS)
    ]
    times: dict[str, list[float]] = {"ynnpack": [], "eigen": [], "sliced": []}
    for num_rows in rows:
        x = weight(num_rows, hidden_size)
        runs = {name: _runner(name, x, layers) for name in times}
        seconds: dict[str, list[float]] = {name: [] for name in times}
        for turn in range(rounds):
            for name in list(runs) if turn % 2 else reversed(list(runs)):
                seconds[name].append(runs[name]())
        for name, each in seconds.items():
            times[name].append(1e3 * statistics.median(each))
    ratios = [eigen / ynn for eigen, ynn in zip(times["eigen"], times["ynnpack"], strict=True)]
    library: ProductLibrary = "ynnpack"
    if statistics.geometric_mean(ratios) < 1 - MARGIN:
        library = "eigen"
    return TunedProducts(
        library=library,
        sliced=faster_between(rows, times["sliced"], times[library]),
        rows=rows,
        ms={name: tuple(each) for name, each in times.items()},
    )


def faster_between(
    rows: Sequence[int], ms: Sequence[float], others: Sequence[float]
) -> tuple[int, int] | None:
    """The first and the last of the longest run of `rows`, ascending, whose `ms` are less than
    `others`; None if there is none."""
    longest: list[int] = []
    run: list[int] = []
    for num_rows, one, other in zip(rows, ms, others, strict=True):
        run = [*run, num_rows] if one < (1 - SLICED_MARGIN) * other else []
        longest = max(longest, run, key=len)
    return (longest[0], longest[-1]) if longest else None


def _runner(how: str, x: jax.Array, layers: Any) -> Callable[[], float]:
    """Seconds of one run with a library or "sliced" weights; it is compiled and has run once."""
    is_sliced = how == "sliced"
    multiply = sliced_linear if is_sliced else jnp.matmul

    def step(x: jax.Array, layers: Any) -> jax.Array:
        width = x.shape[1]
        for gate_up, down in layers:
            hidden = jax.lax.optimization_barrier(multiply(x, gate_up))
            x = x + multiply(hidden[:, : hidden.shape[1] // 2], down)[:, :width]
        return x

    if is_sliced:
        layers = jax.tree.map(lambda weight: slice_weight(weight, 1), layers)
    options = None if is_sliced else product_compiler_options(how)
    program = jax.jit(step).lower(x, layers).compile(options)

    def run() -> float:
        begun_s = time.perf_counter()
        jax.block_until_ready(program(x, layers))
        return time.perf_counter() - begun_s

    run()
    return run
