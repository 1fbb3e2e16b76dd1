"""Measures how a CPU's float32 products are best computed: by which library, from int8-split
weights, from block-quantized ones in panels, and greedy tokens by bounds. What it finds is a tuning
table's `products`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.compat import compile_lowered, product_compiler_options
from octavo.pallas_kernels.cpu.block_quantized_linear import (
    COMPILER_OPTIONS as BLOCK_QUANTIZED_OPTIONS,
)
from octavo.pallas_kernels.cpu.block_quantized_linear import (
    BlockQuantizedWeight,
    PanelWeight,
    block_quantized_linear,
    lay_out_blocks,
    make_panels,
)
from octavo.pallas_kernels.cpu.bounded_argmax import bounded_argmax, make_logit_bounds
from octavo.pallas_kernels.cpu.eigen_linear import EigenWeight, eigen_linear
from octavo.pallas_kernels.cpu.int8_split_linear import int8_split_linear, split_weight
from octavo.pallas_kernels.stored_blocks import Blocks, BlockType
from octavo.pallas_kernels.tuning import ProductLibrary, Span

ROWS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 512)
"""Of the steps that they are measured on."""
MARGIN = 0.03
"""A gain below it is noise on most machines."""
MEMORY_MARGIN = 0.1
"""Digits take three quarters of the layers' memory: a gain below it is none."""
BOUNDS_MARGIN = 0.05
"""Bounds take half of the output layer's."""
MOST_SAMPLED = 128
"""Rows that get a token in a step, however many tokens it computes."""
_LAYERS = 8
"""So many that their weights do not stay in a core's cache from one step to the next."""
_BLOCK_TYPE = BlockType(
    codes=32, nibbles=True, scale_dtype=np.dtype(np.float16), minimum_dtype=np.dtype(np.float16)
)
"""Q4_1's."""
_LIBRARIES: tuple[ProductLibrary, ...] = ("ynnpack", "eigen")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Of the model whose products are timed.

    Attributes:
        hidden_size, intermediate_size, num_layers, vocab_size: as in its configuration.
        can_bound_logits: whether its greedy tokens can be found by bounds of logits.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    can_bound_logits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedProducts:
    """What came of measuring.

    Attributes:
        library: the faster one for layers; "ynnpack" where they are alike.
        int8_split: the least and the most of those neighbours among `rows` with which all products
            of a decode step are faster with int8-split weights (which leaves the output layer to
            YNNPACK, or to bounds) than with `library`; None where they are with none.
        bounded_argmax: of those with which a decode step by `library` is faster by bounds than with
            all logits.
        block_quantized: the most of `rows` up to which a decode step is faster still with
            block-quantized weights, as one row always is.
        rows: of the steps.
        ms: milliseconds for each of `rows`: of a few layers' products by library, "int8_split",
            "block_quantized", and by Eigen in a program of YNNPACK's ("eigen_turned"); of finding
            each row's likeliest token by library ("eigen_output") and "bounded_argmax".
    """

    library: ProductLibrary
    int8_split: Span | None
    bounded_argmax: Span | None
    block_quantized: int
    rows: tuple[int, ...]
    ms: dict[str, tuple[float, ...]]

    def entry(self) -> dict[str, Any]:
        """As a table holds it."""
        rounded = {f"{name}_ms": [round(ms, 3) for ms in each] for name, each in self.ms.items()}
        key = {"dtype": "float32", "num_cores": tuning.num_cores()}
        spans = {"int8_split": self.int8_split, "bounded_argmax": self.bounded_argmax}
        as_lists = {name: span and list(span) for name, span in spans.items()}
        chosen = {"library": self.library, **as_lists, "block_quantized": self.block_quantized}
        return {**key, **chosen, "rows": list(self.rows), **rounded}


def tune_products(
    size: ModelSize, *, rows: tuple[int, ...] = ROWS, rounds: int = 7
) -> TunedProducts:
    """Times a few layers' products, and the output layer, in each way in turns, on the CPU.

    Args:
        size: of the model.
        rows: of the steps to time.
        rounds: of each step, of which the median counts.
    """
    times: dict[str, list[float]] = {}
    runners = _layer_runners(size), _output_runners(size)
    for num_rows in rows:
        sampled = min(num_rows, MOST_SAMPLED)
        for each, number in zip(runners, (num_rows, sampled), strict=True):
            x = _normal(number, size.hidden_size)
            runs = {name: runner(x) for name, runner in each.items()}
            for name, ms in _medians_ms(runs, rounds).items():
                times.setdefault(name, []).append(ms)
    return choose(size, rows, {name: tuple(each) for name, each in times.items()})


def choose(
    size: ModelSize, rows: tuple[int, ...], ms: dict[str, tuple[float, ...]]
) -> TunedProducts:
    """What the times say.

    Args:
        size: of the model.
        rows: of the steps.
        ms: as in `TunedProducts`; "bounded_argmax" is missing where the model has no bounds,
            "block_quantized" where its layers are not made of whole blocks.
    """
    ratios = [eigen / ynn for eigen, ynn in zip(ms["eigen"], ms["ynnpack"], strict=True)]
    library: ProductLibrary = "ynnpack"
    if statistics.geometric_mean(ratios) < 1 - MARGIN:
        library = "eigen"

    def steps_ms(layers: str, output: str) -> list[float]:
        parts = zip(ms[layers], ms[output], strict=True)
        return [each * size.num_layers / _LAYERS + last for each, last in parts]

    whole, split = steps_ms(library, f"{library}_output"), steps_ms("int8_split", "ynnpack_output")
    bounded_argmax = None
    if "bounded_argmax" in ms:
        layers = "eigen_turned" if library == "eigen" else library
        with_bounds = steps_ms(layers, "bounded_argmax")
        bounded_argmax = faster_between(rows, with_bounds, whole, BOUNDS_MARGIN)
        if bounded_argmax is not None:
            is_bounded = [bounded_argmax[0] <= each <= bounded_argmax[1] for each in rows]
            whole = _where(is_bounded, with_bounds, whole)
            split = _where(is_bounded, steps_ms("int8_split", "bounded_argmax"), split)
    int8_split = faster_between(rows, split, whole, MEMORY_MARGIN)
    block_quantized = 1
    if "block_quantized" in ms:
        # Of layers alone: the output layer may have its bounds beside them.
        is_split = [
            int8_split is not None and int8_split[0] <= each <= int8_split[1] for each in rows
        ]
        others = _where(is_split, ms["int8_split"], ms[library])
        block_quantized = most_faster(rows, ms["block_quantized"], others)
    return TunedProducts(
        library=library,
        int8_split=int8_split,
        bounded_argmax=bounded_argmax,
        block_quantized=block_quantized,
        rows=rows,
        ms=ms,
    )


def faster_between(
    rows: Sequence[int], ms: Sequence[float], others: Sequence[float], margin: float
) -> Span | None:
    """The first and the last of the longest run of `rows`, ascending, whose `ms` are less than
    `others` by more than `margin`; None if there is none."""
    longest: list[int] = []
    run: list[int] = []
    for num_rows, one, other in zip(rows, ms, others, strict=True):
        run = [*run, num_rows] if one < (1 - margin) * other else []
        longest = max(longest, run, key=len)
    return (longest[0], longest[-1]) if longest else None


def most_faster(rows: Sequence[int], ms: Sequence[float], others: Sequence[float]) -> int:
    """The last of `rows`, ascending, up to which all `ms` are less than `others` by more than
    `MARGIN`; one row is not asked."""
    most = 1
    for num_rows, one, other in zip(rows, ms, others, strict=True):
        if num_rows > 1 and one >= (1 - MARGIN) * other:
            break
        most = num_rows
    return most


def _where(chosen: Sequence[bool], ms: Sequence[float], others: Sequence[float]) -> list[float]:
    """`ms` where chosen, and `others` where not."""
    return [one if is_it else other for is_it, one, other in zip(chosen, ms, others, strict=True)]


Run = Callable[[], Any]
_Runner = Callable[[jax.Array], Run]
"""Given a step's activations [T, E], compiles it and returns what runs it."""


def _medians_ms(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Of several ways in turns, the first run of each not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    for turn in range(rounds):
        for name in list(runs) if turn % 2 else reversed(list(runs)):
            begun_s = time.perf_counter()
            jax.block_until_ready(runs[name]())
            seconds[name].append(time.perf_counter() - begun_s)
    return {name: 1e3 * statistics.median(each) for name, each in seconds.items()}


def _layer_runners(size: ModelSize) -> dict[str, _Runner]:
    hidden = size.hidden_size
    layers = [
        (_normal(hidden, 2 * size.intermediate_size), _normal(size.intermediate_size, hidden))
        for _ in range(_LAYERS)
    ]
    int8_split = jax.tree.map(lambda weight: split_weight(weight, 1), layers)

    def step(multiply: Callable[..., jax.Array], x: jax.Array, layers: Any) -> jax.Array:
        width = x.shape[1]
        for gate_up, down in layers:
            inner = jax.lax.optimization_barrier(multiply(x, gate_up))
            x = x + multiply(inner[:, : inner.shape[1] // 2], down)[:, :width]
        return x

    marked = jax.tree.map(lambda weight: EigenWeight(weight=weight), layers)

    def runner(x: jax.Array, *, how: str) -> Run:
        if how == "int8_split":
            return _compiled(partial(step, int8_split_linear), None, x, int8_split)
        if how == "eigen_turned":
            return _compiled(partial(step, eigen_linear), None, x, marked)
        if how == "block_quantized":
            return _compiled(
                partial(step, block_quantized_linear), BLOCK_QUANTIZED_OPTIONS, x, block_quantized
            )
        return _compiled(partial(step, jnp.matmul), product_compiler_options(how), x, layers)

    ways = [*_LIBRARIES, "eigen_turned", "int8_split"]
    block_quantized: list[Any] = []
    if hidden % _BLOCK_TYPE.codes == size.intermediate_size % _BLOCK_TYPE.codes == 0:
        block_quantized = jax.tree.map(lambda weight: _panels(*weight.shape), layers)
        ways.append("block_quantized")
    return {how: partial(runner, how=how) for how in ways}


def _output_runners(size: ModelSize) -> dict[str, _Runner]:
    table = _normal(size.vocab_size, size.hidden_size)
    # As each library has it: inputs first for Eigen.
    layouts = {"ynnpack": (table, 1), "eigen": (jnp.asarray(table.T), 0)}

    def whole(x: jax.Array, weight: jax.Array, *, contracted: int) -> jax.Array:
        numbers = (((1,), (contracted,)), ((), ()))
        logits = jax.lax.dot_general(x, weight, numbers, precision="highest")
        # Which of them it is takes hardly longer.
        return logits.max(axis=1)

    def runner(x: jax.Array, *, library: str) -> Run:
        weight, contracted = layouts[library]
        options = product_compiler_options(library)
        return _compiled(partial(whole, contracted=contracted), options, x, weight)

    runners: dict[str, _Runner] = {
        f"{library}_output": partial(runner, library=library) for library in _LIBRARIES
    }
    if size.can_bound_logits:
        bounds = jax.jit(make_logit_bounds)(table)

        def bounded(x: jax.Array) -> Run:
            active = jnp.ones(len(x), bool)
            return _compiled(bounded_argmax, None, x, table, bounds, active)

        runners["bounded_argmax"] = bounded
    return runners


def _compiled(function: Callable[..., Any], options: dict[str, str] | None, *args: Any) -> Run:
    program = compile_lowered(jax.jit(function).lower(*args), options)
    return partial(program, *args)


def _panels(num_inputs: int, num_outputs: int) -> PanelWeight:
    """A random weight; its numbers are as large as `_normal`'s."""
    random = np.random.default_rng(num_inputs)
    kind, num_blocks = _BLOCK_TYPE, num_inputs // _BLOCK_TYPE.codes
    codes = random.integers(0, 256, (num_outputs, num_blocks, kind.code_bytes), dtype=np.uint8)
    scale = np.full((num_outputs, num_blocks), 0.2 * num_inputs**-0.5, np.float16)
    blocks = Blocks(type=kind, codes=codes, scale=scale, minimum=-7.5 * scale)
    weight: BlockQuantizedWeight = jax.tree.map(jnp.asarray, lay_out_blocks(blocks, (num_outputs,)))
    made: PanelWeight = jax.jit(make_panels)(weight)
    return made


def _normal(*shape: int) -> jax.Array:
    random = np.random.default_rng(sum(shape))
    return jnp.asarray(random.standard_normal(shape, np.float32) * shape[0] ** -0.5)
