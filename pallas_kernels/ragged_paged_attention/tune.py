"""Measures block sizes on the device at hand.

Every candidate is compiled and timed a few times on long and on short rows; the fastest few meet
the default again in rounds in which all of them take turns, so that a machine that changes its
speed changes it for all. A candidate's score is its time over the default's, in the geometric mean
of the two: what helps long rows may not cost short ones as much. It is taken only if it beats the
default by `MARGIN`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from octavo.pallas_kernels.compat import compile_lowered, product_compiler_options
from octavo.pallas_kernels.cpu.native_attention import compiler_options
from octavo.pallas_kernels.hopper import num_multiprocessors
from octavo.pallas_kernels.ragged_paged_attention.backends import (
    AttentionShape,
    Backend,
)
from octavo.pallas_kernels.ragged_paged_attention.batch import AttentionParams
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import kv_dtype_name
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import pool_layout
from octavo.pallas_kernels.ragged_paged_attention.random_case import make_case
from octavo.pallas_kernels.tuning import (
    CPU,
    Part,
    ProductLibrary,
    TuningKey,
    key_fields,
    tuning_device,
    tuning_key,
)

logger = logging.getLogger(__name__)

MARGIN = 0.03
"""A gain below it is noise on most machines."""
FINALISTS = 4
FIRST_RUNS = 3
SHORTER = 8
"""Short rows have so much less KV than long ones."""

Sizes = dict[str, int]
Attend = Callable[..., jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What block sizes are measured on.

    Attributes:
        rows, row_context: decode rows, and the longest's KV; the others' are spread below it.
        chunk, chunk_context: tokens of a prefill chunk, and the KV at its end.
    """

    rows: int = 32
    row_context: int = 1024
    chunk: int = 512
    chunk_context: int = 1024

    def cases(self, part: Part) -> tuple[list[tuple[int, int]], ...]:
        """Rows (new tokens, KV length), long ones and short ones."""
        if part == "decode":
            spread = np.linspace(0.25, 1.0, self.rows)
            return tuple(
                [(1, max(1, int(context * share))) for share in spread]
                for context in (self.row_context, max(1, self.row_context // SHORTER))
            )
        short = max(1, self.chunk // (2 * SHORTER))
        return (
            [(self.chunk, max(self.chunk, self.chunk_context))],
            [(short, short)] * max(1, self.chunk // short),
        )


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of one part of one shape.

    Attributes:
        tiles: the sizes to use; the default's where nothing beat it.
        ms, default_ms: medians of the last rounds, on long rows and on short ones.
        num_candidates: sizes that ran.
    """

    key: TuningKey
    tiles: Sizes
    default: Sizes
    ms: tuple[float, ...]
    default_ms: tuple[float, ...]
    num_candidates: int

    @property
    def score(self) -> float:
        """Time over the default's, in the geometric mean of the cases."""
        return _score(self.ms, self.default_ms)

    def entry(self) -> dict[str, Any]:
        """As a table holds it."""
        return {
            **key_fields(self.key),
            "tiles": self.tiles,
            "default": self.default,
            "ms": [round(ms, 4) for ms in self.ms],
            "default_ms": [round(ms, 4) for ms in self.default_ms],
            "num_candidates": self.num_candidates,
        }


def tune(
    backend: Backend,
    shape: AttentionShape,
    part: Part,
    workload: Workload,
    *,
    library: ProductLibrary = "ynnpack",
    rounds: int = 7,
    on_candidate: Callable[[int, int], None] = lambda done, total: None,
) -> Tuned:
    """Finds the fastest block sizes of one part.

    Args:
        backend: an implementation with block sizes: xla, mosaic_tpu or mosaic_gpu.
        shape: heads, pages and dtypes; `max_tokens` is not used.
        library: what computes float32 products in the steps of a CPU.
        rounds: of the finalists.
        on_candidate: told how many candidates are measured, and how many there are.

    Raises:
        ValueError: a backend without block sizes.
    """
    cases = [_arguments(backend, shape, rows) for rows in workload.cases(part)]
    q, kv, _ = cases[0]
    key = tuning_key(backend, part, q.shape, q.dtype, kv.pages.shape, kv.pages.dtype)
    everything = _candidates(backend, part, q.shape, q.dtype, kv.pages.shape, kv.pages.dtype)
    options = {
        **(product_compiler_options(library) or {}),
        **compiler_options(backend, kv.pages.dtype),
    }
    runs: dict[int, list[Callable[[], float]]] = {}
    first: dict[int, tuple[float, ...]] = {}
    for index, tiles in enumerate(everything):
        try:
            each = [_runner(backend, part, tiles, arguments, options) for arguments in cases]
            for run in each:
                run()  # compiles
            first[index] = tuple(min(run() for _ in range(FIRST_RUNS)) for run in each)
            runs[index] = each
        except Exception as error:  # whatever a compiler says of a size that does not fit
            if index == 0:
                raise
            logger.info("%s does not run: %s", tiles, error)
        on_candidate(index + 1, len(everything))
    fastest = sorted((i for i in first if i), key=lambda i: _score(first[i], first[0]))
    median = _in_turns({i: runs[i] for i in (0, *fastest[:FINALISTS])}, rounds)
    best = min(median, key=lambda i: _score(median[i], median[0]))
    if _score(median[best], median[0]) > 1 - MARGIN:
        best = 0
    return Tuned(
        key,
        _named(everything[best], part),
        _named(everything[0], part),
        tuple(1e3 * seconds for seconds in median[best]),
        tuple(1e3 * seconds for seconds in median[0]),
        len(runs),
    )


def _in_turns(
    runs: dict[int, list[Callable[[], float]]], rounds: int
) -> dict[int, tuple[float, ...]]:
    """Median seconds of each one's cases; who comes first in a round changes."""
    order = list(runs)
    times: dict[int, list[list[float]]] = {i: [[] for _ in each] for i, each in runs.items()}
    for turn in range(rounds):
        start = turn % len(order)
        for index in order[start:] + order[:start]:
            for seconds, run in zip(times[index], runs[index], strict=True):
                seconds.append(run())
    return {i: tuple(map(statistics.median, each)) for i, each in times.items()}


def _score(times: tuple[float, ...], default: tuple[float, ...]) -> float:
    ratios = [mine / its for mine, its in zip(times, default, strict=True)]
    return math.prod(ratios) ** (1 / len(ratios))


def _arguments(backend: Backend, shape: AttentionShape, rows: list[tuple[int, int]]) -> Any:
    """Queries, pool, batch; the numbers in them do not matter, the lengths do."""
    num_tokens = sum(new for new, _ in rows)
    longest = max(kv_len for _, kv_len in rows)
    pages = -(-longest // shape.page_size)
    q, _, _, kv, batch = make_case(
        np.random.default_rng(0),
        rows,
        num_tokens=num_tokens,
        num_rows=len(rows),
        heads=(shape.num_heads, shape.num_kv_heads),
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        table=-(-pages // 8) * 8,
        dtype=jax.numpy.dtype(shape.q_dtype).name,
        kv_dtype=kv_dtype_name(shape.kv_dtype),
        layout=pool_layout(backend, shape.head_dim, shape.page_size),
        as_bits=backend in ("xla", "reference"),
    )
    if kv.head_dim > shape.head_dim:
        q = jax.numpy.pad(q, ((0, 0), (0, 0), (0, kv.head_dim - shape.head_dim)))
    return q, kv, batch


def _runner(
    backend: Backend, part: Part, tiles: Any, arguments: Any, options: dict[str, str] | None
) -> Callable[[], float]:
    """Seconds of one run with these block sizes; the first run compiles."""
    attend: Attend
    if backend == "mosaic_gpu":
        from octavo.pallas_kernels.ragged_paged_attention.kernel_gpu import attend_mosaic_gpu

        attend = functools.partial(attend_mosaic_gpu, **{f"{part}_tiles": tiles})
    elif backend == "mosaic_tpu":
        from octavo.pallas_kernels.ragged_paged_attention.kernel_tpu import attend_mosaic_tpu

        attend = functools.partial(attend_mosaic_tpu, tiles=tiles)
    else:
        from octavo.pallas_kernels.ragged_paged_attention.xla import attend_xla

        attend = functools.partial(attend_xla, tiles=tiles)
    params = AttentionParams(scale=arguments[0].shape[-1] ** -0.5)
    q, kv, batch = arguments
    step = jax.jit(functools.partial(attend, params=params, decode_only=part == "decode"))
    program = compile_lowered(step.lower(q, kv, batch), options)

    def run() -> float:
        begun_s = time.perf_counter()
        jax.block_until_ready(program(q, kv, batch))
        return time.perf_counter() - begun_s

    return run


def _candidates(
    backend: Backend, part: Part, q_shape: Any, dtype: Any, pool_shape: Any, kv_dtype: Any
) -> list[Any]:
    """The computed default, then the sizes to try; those of the other part are the default's."""
    if backend == "xla":
        return _xla_candidates(part, q_shape, pool_shape)
    if backend == "mosaic_tpu":
        return _tpu_candidates(part, q_shape, dtype, pool_shape, kv_dtype)
    if backend == "mosaic_gpu":
        return _gpu_candidates(part, q_shape[2], dtype.itemsize, kv_dtype.itemsize)
    raise ValueError(f"attention backend {backend!r} has no block sizes")


def _xla_candidates(part: Part, q_shape: Any, pool_shape: Any) -> list[Any]:
    from octavo.pallas_kernels.ragged_paged_attention import tiles_xla

    if not tuning_device().startswith(CPU):
        return _device_xla_candidates(part, q_shape, pool_shape)
    default = tiles_xla.default_xla_tiles(pool_shape[2], pool_shape[4])
    blocks = (32, 64, 128, 256)
    if part == "decode":
        products = replace(default, native_decode=0)
        tried = [
            replace(products, row_group=rows, decode_block=block, score_sums=sums)
            for rows, block, sums in itertools.product((1, 2, 4, 8, 16, 32), blocks, (0, 1))
        ]
    else:
        tried = [
            replace(default, query_tile=tile, prefill_block=block)
            for tile, block in itertools.product((16, 32, 64, 128), blocks)
        ]
    return [default, *(tiles for tiles in tried if tiles != default)]


def _device_xla_candidates(part: Part, q_shape: Any, pool_shape: Any) -> list[Any]:
    """Those of a GPU or TPU."""
    from octavo.pallas_kernels.ragged_paged_attention.tiles_xla import device_xla_tiles

    default = device_xla_tiles(q_shape[1], pool_shape[2], pool_shape[4])
    names = ("row_group", "decode_block") if part == "decode" else ("query_tile", "prefill_block")
    sizes = itertools.product(
        (16, 32, 64) if part == "decode" else (128, 256, 512), (256, 512, 1024)
    )
    tried = [replace(default, **dict(zip(names, each, strict=True))) for each in sizes]
    return [default, *(tiles for tiles in tried if tiles != default)]


def _tpu_candidates(
    part: Part, q_shape: Any, dtype: Any, pool_shape: Any, kv_dtype: Any
) -> list[Any]:
    from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import choose_tpu_tiles

    default = choose_tpu_tiles(q_shape, dtype, pool_shape, kv_dtype)
    pages = [n for n in (1, 2, 4, 8, 16, 32) if 64 <= n * pool_shape[3] <= 2048]
    if part == "decode":
        tried = [replace(default, decode_pages=n) for n in pages]
    else:
        tried = [
            replace(default, prefill_pages=n, prefill_tile=tile)
            for n, tile in itertools.product(pages, (32, 64, 128, 256))
        ]
    return [default, *(tiles for tiles in tried if tiles != default)]


def _gpu_candidates(part: Part, head_dim: int, itemsize: int, kv_itemsize: int) -> list[Any]:
    from octavo.pallas_kernels.ragged_paged_attention import tiles_gpu as gpu

    default: Any
    if part == "prefill":
        default = gpu.choose_prefill_tiles(head_dim, itemsize, kv_itemsize)
        grids: Any = ((64, 128), (1, 2, 3, 4))
        places: tuple[int, ...] = (1,)
        is_narrow = kv_itemsize < itemsize
        fixed = {0: gpu.prefill_fixed_bytes(head_dim, itemsize, is_narrow=is_narrow)}
    else:
        default = gpu.choose_decode_tiles(head_dim, itemsize, kv_itemsize)
        grids = ((64, 128), (1, 2, 3, 4, 5))
        places = (1, 2)
        most_wgs = 2 if head_dim <= 128 else 1
        fixed = {
            num_wgs: gpu.decode_fixed_bytes(head_dim, itemsize, num_wgs)
            for num_wgs in range(1, most_wgs + 1)
        }
    splits = [
        {"num_programs": each * num_multiprocessors(tuning_device()), "min_tiles": least}
        for each, least in itertools.product(places, (2, 4, 8))
    ]
    tried = []
    for num_wgs, tile, stages in itertools.product(fixed, *grids):
        most = gpu.fitting(fixed[num_wgs], head_dim, itemsize, kv_itemsize, tile, stages)
        if kv_itemsize == itemsize:
            raws = [0] if 2 <= stages <= most else []
        else:
            raws = [raw for raw in (1, 2, 4, 6) if raw <= most and stages < 4]
        named = {"tile": tile, "num_stages": stages}
        if num_wgs:
            if stages % num_wgs:
                continue
            named["num_warpgroups"] = num_wgs
        tried += [
            replace(default, **named, num_raw=raw, **split)
            for raw, split in itertools.product(raws, splits)
        ]
    return [default, *(tiles for tiles in tried if tiles != default)]


_GPU_SIZES = ("tile", "num_stages", "num_raw", "num_programs", "min_tiles")
_PARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "XlaTiles": {
        "decode": ("row_group", "decode_block", "score_sums", "native_decode"),
        "prefill": ("query_tile", "prefill_block"),
    },
    "TpuTiles": {"decode": ("decode_pages",), "prefill": ("prefill_pages", "prefill_tile")},
    "DecodeTiles": {"decode": (*_GPU_SIZES, "num_warpgroups")},
    "PrefillTiles": {"prefill": _GPU_SIZES},
}
"""The block sizes that each part has a say in."""


def _named(tiles: Any, part: Part) -> Sizes:
    return {name: getattr(tiles, name) for name in _PARTS[type(tiles).__name__][part]}


def shapes_to_tune(shape: AttentionShape, page_sizes: tuple[int, ...]) -> Iterator[AttentionShape]:
    """The shape in each page size."""
    for page_size in page_sizes:
        yield replace(shape, page_size=page_size)
