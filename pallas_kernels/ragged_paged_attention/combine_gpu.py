"""Decode's partial results on Hopper, weighed and written as the model reads them, in one kernel.

XLA took some nine kernels a layer for the same, each of which costs a launch, and with few rows a
launch costs more than what the kernel does. A program here takes a row, a KV head and up to eight
of its query heads: it walks the places that hold the row's parts, in their order, so that no sum
depends on timing, and writes zeros where there are none. Where parts lie is data of the batch,
computed once and shared by all layers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from octavo.pallas_kernels.compat import mosaic_gpu_options, store_to_global

_MASKED = -1e30
_LOG2E = math.log2(math.e)
_WARPS, _LANES = 4, 32
_VECTOR = 4
"""Numbers that a thread reads at once: 16 bytes."""
_HEADS, _NUMBERS = 8, 1024
"""Most query heads, and numbers of a part, that a program holds: eight numbers a thread."""
_FIRST, _REST = 2, 8
"""Parts read at once: most rows have one or two; where there are more, reading waits for memory."""


def combine_gpu(
    part: jax.Array,
    lse: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    *,
    group: int,
    dtype: Any,
    sinks: jax.Array | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Weighs each row's parts by their log-sum-exp.

    Args:
        part: float32[Hkv, N, Gp, D] normalised; garbage where no program wrote. D is 64 or a
            multiple of 128.
        lse: float32[Hkv, N, 64] base-2 logarithms of denominators; garbage as `part`.
        begin, end: int32[Hkv, S] places of N that hold a row's parts; none where they are equal.
        group: G, query heads of a KV head, at most Gp.
        dtype: of the result.
        sinks: float32[Hkv · G] a logit each head adds to the softmax's denominator; None is none.
        interpret: run in Pallas' interpreter.

    Returns:
        [S, Hkv · G, D]; zeros for rows without parts.
    """
    num_kv_heads, _, _, head_dim = part.shape
    num_rows = begin.shape[1]
    heads = block_heads(group, head_dim)
    call = plgpu.kernel(
        partial(_kernel, heads, sinks is not None),
        out_type=jax.ShapeDtypeStruct((num_rows, num_kv_heads, group, head_dim), dtype),
        grid=(num_rows, num_kv_heads, group // heads),
        grid_names=("row", "head", "block"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic_gpu_options(
            pl.CostEstimate(
                flops=2 * num_rows * num_kv_heads * group * head_dim,
                transcendentals=num_rows * num_kv_heads * group,
                bytes_accessed=num_rows
                * num_kv_heads
                * group
                * head_dim
                * (part.dtype.itemsize + jnp.dtype(dtype).itemsize),
            ),
            interpret,
        ),
    )
    sink = () if sinks is None else (sinks.astype(jnp.float32).reshape(num_kv_heads, group),)
    out = call(begin, end, part, lse, *sink)
    return out.reshape(num_rows, num_kv_heads * group, head_dim)


def block_heads(group: int, head_dim: int) -> int:
    """Query heads of one program: a divisor of the group, so that no program has fewer."""
    most = min(group, _HEADS, _NUMBERS // head_dim)
    return max(n for n in range(1, most + 1) if group % n == 0)


def part_layout(heads: int, head_dim: int) -> Any:
    """How float32[heads, head_dim] lies in the registers of a warpgroup.

    As many warps as divide the heads have one each, the others share its columns; a thread's
    numbers are next to each other. A single head of 64 columns is too short for four warps: two
    pairs then hold the same.
    """
    rows = math.gcd(heads, _WARPS)
    across = _WARPS // rows
    if across * _LANES > head_dim:
        across = head_dim // _LANES
    vector = min(_VECTOR, head_dim // (across * _LANES))
    tiles: list[tuple[int, ...]] = [(rows, across * _LANES * vector)]
    if across > 1:
        tiles.append((_LANES * vector,))
    tiles.append((vector,))
    # Tiled: rows, warps across if more than one, lanes, numbers of a thread.
    warps: tuple[Any, ...] = (-4, -3) if rows > 1 and across > 1 else (-3,)
    if rows * across < _WARPS:
        warps = (plgpu.Replicated(_WARPS // (rows * across)), *warps)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(tiles)), warp_dims=warps, lane_dims=(-2,), vector_dim=-1
    )


def _kernel(
    heads: int,
    has_sinks: bool,
    # Global memory.
    begin_ref: Any,  # int32[Hkv, S]
    end_ref: Any,  # int32[Hkv, S]
    part_ref: Any,  # float32[Hkv, N, Gp, D]
    lse_ref: Any,  # float32[Hkv, N, 64]
    *sink_and_output: Any,  # float32[Hkv, G] if there are sinks; [S, Hkv, G, D]
) -> None:
    *sink_ref, out_ref = sink_and_output
    row, head, block = (lax.axis_index(name) for name in ("row", "head", "block"))
    head_dim = part_ref.shape[3]
    shape = (heads, head_dim)
    layout = part_layout(heads, head_dim)
    by_head = layout.reduce(1)
    here = pl.ds(block * heads, heads)
    begin, end = begin_ref[head, row], end_ref[head, row]
    out = out_ref.at[row, head, here]
    _Sums = tuple[Any, Any, Any]  # of parts so far: weighed, greatest logarithm, weights

    def add(place: Any, count: int, sums: _Sums) -> _Sums:
        """Adds parts from `place` on, `count` or as many as there are."""
        acc, peak, total = sums
        places = [jnp.minimum(place + k, end - 1) for k in range(count)]
        logs = [
            plgpu.load(lse_ref.at[head, p, here], layout=by_head, optimized=False) for p in places
        ]
        parts = [
            plgpu.load(part_ref.at[head, p, here], layout=layout, optimized=False) for p in places
        ]
        # The last is read again in place of those that do not exist, and weighs nothing.
        logs = [log + jnp.where(place + k < end, 0.0, _MASKED) for k, log in enumerate(logs)]
        new_peak = peak
        for log in logs:
            new_peak = jnp.maximum(new_peak, log)
        shrink = jnp.exp2(peak - new_peak)
        total = total * shrink
        acc = acc * lax.broadcast_in_dim(shrink, shape, [0])
        for log, one in zip(logs, parts, strict=True):
            weight = jnp.exp2(log - new_peak)
            total = total + weight
            acc = acc + one * lax.broadcast_in_dim(weight, shape, [0])
        return acc, new_peak, total

    @pl.when(end > begin)
    def _weigh() -> None:
        acc = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        if has_sinks:
            peak = plgpu.load(sink_ref[0].at[head, here], layout=by_head, optimized=False) * _LOG2E
            total = plgpu.layout_cast(jnp.ones((heads,), jnp.float32), by_head)
        else:
            peak = plgpu.layout_cast(jnp.full((heads,), _MASKED, jnp.float32), by_head)
            total = plgpu.layout_cast(jnp.zeros((heads,), jnp.float32), by_head)
        sums = add(begin, _FIRST, (acc, peak, total))
        rest = begin + _FIRST
        acc, _, total = lax.fori_loop(
            jnp.int32(0),
            lax.div(jnp.maximum(end - rest, 0) + _REST - 1, _REST),
            lambda i, sums: add(rest + i * _REST, _REST, sums),
            sums,
        )
        whole = acc / lax.broadcast_in_dim(total, shape, [0])
        store_to_global(out, whole.astype(out_ref.dtype))

    @pl.when(end <= begin)
    def _nothing() -> None:
        zeros = plgpu.layout_cast(jnp.zeros(shape, out_ref.dtype), layout)
        store_to_global(out, zeros)
