"""Decode attention for Hopper: split KV, page-sized bulk copies, a combine.

A work item is (row, stretch of KV tiles); a block of the grid takes one item of one KV head. Long
rows are cut into several items so that all of the GPU's multiprocessors have work whatever the
lengths are (Source: Flash-Decoding; Dao et al. 2023). In a block one warpgroup copies pages with
the bulk tensor engine, `num_stages` tiles ahead, and another computes: all G query heads that share
the KV head are rows of one matrix product, padded to the 64 rows that wgmma takes. Partial results
leave in float32 with their log-sum-exp and are combined by XLA with one matrix product a head,
whose order of summation does not depend on timing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from octavo.pallas_kernels.ragged_paged_attention.batch import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
)
from octavo.pallas_kernels.ragged_paged_attention.copies_gpu import (
    PagedTiles,
    kv_memory,
    kv_scratch,
)
from octavo.pallas_kernels.ragged_paged_attention.cost import attention_cost
from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import (
    DecodeTiles,
    accumulate,
    choose_decode_tiles,
    out_columns,
    query_key_product,
    softcap_scores,
    tiled_smem,
)
from octavo.pallas_kernels.ragged_paged_attention.tuning import tuning_key
from octavo.pallas_kernels.ragged_paged_attention.worklist import block_range, decode_worklist

_MASKED = -1e30
_LOG2E = math.log2(math.e)
QUERY_ROWS = 64
"""Rows of a wgmma tile."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SplitWork:
    """Stretches of KV tiles. Items beyond the last have first = end.

    Attributes:
        row: int32[I] whose KV; S beyond the last item.
        first, end: int32[I] KV tiles.
    """

    row: jax.Array
    first: jax.Array
    end: jax.Array


def split_worklist(
    batch: RaggedBatch, params: AttentionParams, tiles: DecodeTiles, num_kv_heads: int
) -> SplitWork:
    """Cuts every decode row's KV into stretches of about equal length.

    The stretch is the least number of tiles that gives no more than `tiles.target_blocks` blocks of
    the grid over all rows and heads, and at least `tiles.min_tiles`.
    """
    num_rows = batch.kv_lens.shape[0]
    work = decode_worklist(batch)
    first, end = block_range(work, batch.kv_lens, params, tiles.tile)
    live = jnp.arange(num_rows, dtype=jnp.int32) < work.num_items[0]
    count = jnp.where(live, end - first, 0)
    wanted = max(1, tiles.target_blocks // num_kv_heads)
    stretch = jnp.maximum((count.sum() + wanted - 1) // wanted, tiles.min_tiles).astype(jnp.int32)
    parts = (count + stretch - 1) // stretch
    ends = jnp.cumsum(parts, dtype=jnp.int32)
    item = jnp.arange(num_rows + wanted, dtype=jnp.int32)
    used = item < ends[-1]
    of = jnp.searchsorted(ends, item, side="right", method="compare_all").astype(jnp.int32)
    of = jnp.where(used, of, 0)
    begin = first[of] + (item - (ends[of] - parts[of])) * stretch
    return SplitWork(
        row=jnp.where(used, work.row[of], num_rows),
        first=jnp.where(used, begin, 0),
        end=jnp.where(used, jnp.minimum(begin + stretch, end[of]), 0),
    )


def decode_gpu(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    *,
    sinks: jax.Array | None = None,
    tiles: DecodeTiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of decode rows.

    Args:
        q: [T, Hq, D] bfloat16; row s reads token `cu_q_lens[s]`.
        kv, batch, params, sinks, interpret: see `attend_mosaic_gpu`.
        tiles: block sizes; None takes the measured or computed ones of the shape.

    Returns:
        float32[S, Hq, D]; rows that are no decode rows or idle hold zeros.
    """
    num_rows = batch.kv_lens.shape[0]
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.num_kv_heads
    group = num_heads // num_kv_heads
    padded = -(-group // 8) * 8
    key = tuning_key("mosaic_gpu", "decode", q.shape, q.dtype, kv.pages.shape, kv.pages.dtype)
    tiles = tiles or choose_decode_tiles(head_dim, q.dtype.itemsize, kv.pages.dtype.itemsize, key)
    work = split_worklist(batch, params, tiles, num_kv_heads)
    num_items = work.row.shape[0]

    rows = q[jnp.minimum(batch.cu_q_lens[:-1], q.shape[0] - 1)]
    rows = rows.reshape(num_rows, num_kv_heads, group, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    table = batch.block_table
    call = plgpu.kernel(
        partial(_kernel, params, tiles.tile, table.shape[1], bool(interpret)),
        out_type=(
            jax.ShapeDtypeStruct((num_items, num_kv_heads, padded, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_items, num_kv_heads, QUERY_ROWS), jnp.float32),
        ),
        scratch_types={
            "q_smem": tiled_smem((QUERY_ROWS, head_dim), q.dtype),
            "out_smem": plgpu.SMEM((QUERY_ROWS, out_columns(head_dim)), jnp.float32),
            "lse_smem": plgpu.SMEM((QUERY_ROWS,), jnp.float32),
            "q_ready": plgpu.Barrier(),
            **kv_scratch(tiles, head_dim, kv.page_size, q.dtype, kv.pages.dtype, 1),
        },
        grid=(num_kv_heads, num_items),
        grid_names=("head", "item"),
        num_threads=2,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=attention_cost(
            num_queries=num_rows,
            context=table.shape[1] * kv.page_size,
            kv_reads=num_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_itemsize=q.dtype.itemsize,
            kv_itemsize=kv.pages.dtype.itemsize,
            scale_bytes=0 if kv.scales is None else kv.scales.dtype.itemsize,
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    part, lse = call(
        jnp.minimum(work.row, num_rows - 1),
        work.first,
        work.end,
        batch.kv_lens,
        table.reshape(-1),
        rows,
        kv.pages,
        *(() if kv.scales is None else (kv.scales,)),
    )
    out = _combine(part[:, :, :group], lse[:, :, :group], work.row, num_rows, sinks)
    return out.reshape(num_rows, num_heads, head_dim)


def _combine(
    part: jax.Array, lse: jax.Array, row: jax.Array, num_rows: int, sinks: jax.Array | None
) -> jax.Array:
    """Weighs each row's parts by their log-sum-exp.

    Args:
        part: float32[I, Hkv, G, D] normalised; garbage in items of no row.
        lse: float32[I, Hkv, G] base-2 logarithms of denominators.
        row: int32[I]; `num_rows` for items of no row.

    Returns:
        float32[S, Hkv, G, D].
    """
    used = (row < num_rows)[:, None, None]
    part = jnp.where(used[..., None], part, 0.0)
    belongs = row[None, :] == jnp.arange(num_rows, dtype=jnp.int32)[:, None]  # [S, I]
    each = jnp.where(belongs[:, :, None, None], lse[None], _MASKED)  # [S, I, Hkv, G]
    peak = each.max(axis=1)
    if sinks is not None:
        sink = jnp.broadcast_to(
            sinks.astype(jnp.float32).reshape(peak.shape[1:]) * _LOG2E, peak.shape
        )
        peak = jnp.maximum(peak, sink)
    weight = jnp.where(belongs[:, :, None, None], jnp.exp2(each - peak[:, None]), 0.0)
    total = weight.sum(axis=1)
    if sinks is not None:
        total = total + jnp.exp2(sink - peak)
    weight = weight / jnp.maximum(total, 1e-30)[:, None]
    return jnp.einsum("sihg,ihgd->shgd", weight, part, precision=lax.Precision.HIGHEST)


def _kernel(
    params: AttentionParams,
    tile: int,
    table_pages: int,
    plain: bool,
    # Global memory.
    row_ref: Any,  # int32[I]
    first_ref: Any,  # int32[I]
    end_ref: Any,  # int32[I]
    kv_lens_ref: Any,  # int32[S]
    table_ref: Any,  # int32[S · M]
    q_ref: Any,  # [S, Hkv, Gp, D]
    *pool_and_outputs: Any,  # [N, 2, Hkv, P, D], scales [N, 2, Hkv, P] if any; then
    # float32[I, Hkv, Gp, D] and float32[I, Hkv, 64]
    q_smem: Any,  # [64, D]
    out_smem: Any,  # float32[64, columns]
    lse_smem: Any,  # float32[64]
    q_ready: Any,
    **kv_refs: Any,
) -> None:
    *pools, out_ref, lse_ref = pool_and_outputs
    item, head = lax.axis_index("item"), lax.axis_index("head")
    wg = lax.axis_index("wg")
    first, end = first_ref[item], end_ref[item]
    row = row_ref[item]
    padded, head_dim = q_ref.shape[2:]
    kv = kv_memory(first, kv_refs)

    @pl.when((end > first) & (wg == 1))
    def _copies() -> None:
        source = PagedTiles(
            pools=tuple(pools),
            table=table_ref,
            table_row=row * table_pages,
            table_pages=table_pages,
            head=head,
            tile=tile,
        )
        kv.copy_all(source, end)

    @pl.when((end > first) & (wg == 0))
    def _compute() -> None:
        kv_len = kv_lens_ref[row]
        # Rows of the tile beyond the group are zeros: their scores are too, and nobody reads them.
        q_smem[...] = plgpu.layout_cast(
            jnp.zeros((QUERY_ROWS, head_dim), q_smem.dtype), plgpu.Layout.WGMMA
        )
        plgpu.commit_smem()
        plgpu.copy_gmem_to_smem(q_ref.at[row, head], q_smem.at[pl.ds(0, padded)], q_ready)
        plgpu.barrier_wait(q_ready)

        by_row = plgpu.Layout.WGMMA.reduce(1)
        peak = plgpu.layout_cast(jnp.full((QUERY_ROWS,), _MASKED, jnp.float32), by_row)
        total = plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), by_row)
        acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)

        def one_tile(index: Any, carry: Any) -> Any:
            acc, peak, total = carry
            slot = kv.stage(index)
            plgpu.barrier_wait(kv.ready[0].at[slot])
            scores = query_key_product(q_smem, kv.tiles[0].at[slot], plain)
            plgpu.barrier_arrive(kv.free[0].at[slot])
            if kv.scales is not None:
                scores = scores * kv.scale_row(index, 0, scores.shape)
            scores, scale = softcap_scores(scores, params)
            key = index * tile + plgpu.broadcasted_iota(
                jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA
            )
            visible = key < kv_len
            if params.sliding_window is not None:
                visible &= key >= kv_len - params.sliding_window
            scores = jnp.where(visible, scores, _MASKED)
            new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
            shrink = jnp.exp2(peak - new_peak)
            weight = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
            total = total * shrink + weight.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
            if kv.scales is not None:
                weight = weight * kv.scale_row(index, 1, weight.shape)
            plgpu.barrier_wait(kv.ready[1].at[slot])
            acc = accumulate(acc, weight.astype(q_smem.dtype), kv.tiles[1].at[slot], plain)
            plgpu.barrier_arrive(kv.free[1].at[slot])
            return acc, new_peak, total

        acc, peak, total = lax.fori_loop(first, end, one_tile, (acc, peak, total))
        out = acc / lax.broadcast_in_dim(total, acc.shape, [0])
        lse_smem[...] = peak + jnp.log2(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[item, head])
        width = out_smem.shape[-1]
        for column in range(0, head_dim, width):
            here = slice(column, column + width)
            out_smem[...] = out[:, here]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, padded)], out_ref.at[item, head, :, here])
            plgpu.wait_smem_to_gmem(0)
