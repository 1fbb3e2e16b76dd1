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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.compat import product_compiler_options

ProductLibrary = tuning.ProductLibrary
"""The name of one: "ynnpack" or "eigen"."""
ROWS = (8, 32, 64, 128, 512)
"""Of the steps that the two are measured on."""
MARGIN = 0.03
"""A gain below it is noise on most machines."""
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
    leaves = jax.tree.leaves(weights)
    device = next(iter(leaves[0].sharding.device_set))
    dtypes = {leaf.dtype for leaf in leaves} | {jnp.dtype(kv_dtype)}
    if device.platform != "cpu" or dtypes != {jnp.dtype("float32")}:
        return "ynnpack"
    return tuning.product_library("float32") or "ynnpack"


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedProducts:
    """What came of measuring both.

    Attributes:
        library: the faster one; "ynnpack" where they are alike.
        rows: of the steps.
        ms: by library, milliseconds of a few layers' products, for each of `rows`.
    """

    library: ProductLibrary
    rows: tuple[int, ...]
    ms: dict[ProductLibrary, tuple[float, ...]]

    def entry(self) -> dict[str, Any]:
        """As a table holds it."""
        rounded = {f"{name}_ms": [round(ms, 3) for ms in each] for name, each in self.ms.items()}
        key = {"dtype": "float32", "num_cores": tuning.num_cores()}
        return {**key, "library": self.library, "rows": list(self.rows), **rounded}


def tune_products(
    hidden_size: int, intermediate_size: int, *, rows: tuple[int, ...] = ROWS, rounds: int = 7
) -> TunedProducts:
    """Times a few layers' products with both libraries, in turns, on the CPU.

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
    times: dict[ProductLibrary, list[float]] = {"ynnpack": [], "eigen": []}
    for num_rows in rows:
        x = weight(num_rows, hidden_size)
        runs = {name: _runner(name, x, layers) for name in times}
        seconds: dict[ProductLibrary, list[float]] = {name: [] for name in times}
        for turn in range(rounds):
            for name in list(runs) if turn % 2 else reversed(list(runs)):
                seconds[name].append(runs[name]())
        for name, each in seconds.items():
            times[name].append(1e3 * statistics.median(each))
    ratios = [eigen / ynn for eigen, ynn in zip(times["eigen"], times["ynnpack"], strict=True)]
    return TunedProducts(
        library="eigen" if statistics.geometric_mean(ratios) < 1 - MARGIN else "ynnpack",
        rows=rows,
        ms={name: tuple(each) for name, each in times.items()},
    )


def _runner(library: ProductLibrary, x: jax.Array, layers: Any) -> Callable[[], float]:
    """Seconds of one run; it is compiled and has run once."""

    def step(x: jax.Array, layers: Any) -> jax.Array:
        for gate_up, down in layers:
            hidden = jax.lax.optimization_barrier(x @ gate_up)
            x = x + hidden[:, : down.shape[0]] @ down
        return x

    program = jax.jit(step).lower(x, layers).compile(product_compiler_options(library))

    def run() -> float:
        begun_s = time.perf_counter()
        jax.block_until_ready(program(x, layers))
        return time.perf_counter() - begun_s

    run()
    return run
