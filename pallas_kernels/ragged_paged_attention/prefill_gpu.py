"""Prefill and mixed attention for Hopper: warp-specialised wgmma over a worklist of query tiles.

A work item is a tile of one row's chunk; a block of the grid takes one item of one KV head: 128
rows of packed queries (tokens × grouped heads), 64 for each of two computing warpgroups, while a
third copies pages with the bulk tensor engine. Both computing warpgroups share every KV tile. They
take turns at the tensor cores: one multiplies while the other does its softmax (Source: Shah et
al., FlashAttention-3, arXiv 2407.08608). Tiles that every query sees whole are walked without a
mask, the rest with one.

Items are issued longest first, so that the hardware's own block scheduler balances ragged work:
nothing is left running alone at the end but short tiles.
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
    PrefillTiles,
    accumulate,
    choose_prefill_tiles,
    out_columns,
    query_key_product,
    softcap_scores,
    tiled_smem,
)
from octavo.pallas_kernels.ragged_paged_attention.tuning import tuning_key
from octavo.pallas_kernels.ragged_paged_attention.worklist import (
    block_range,
    pack_prefill,
    prefill_worklist,
)

_MASKED = -1e30
_LOG2E = math.log2(math.e)
COMPUTE_WGS = 2
QUERY_ROWS = 64
"""Rows of packed queries of one warpgroup."""
_REGISTERS = ((40, 232), (72, 216))
"""Of the copying warpgroup and of a computing one; the second pair where the first widens."""


def prefill_gpu(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    *,
    sinks: jax.Array | None = None,
    tiles: PrefillTiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of prefill rows.

    Args:
        q: [T, Hq, D] bfloat16.
        kv, batch, params, sinks, interpret: see `attend_mosaic_gpu`.
        tiles: block sizes; None takes the measured or computed ones of the shape.

    Returns:
        [T, Hq, D] in q's dtype; garbage in tokens of other rows.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.num_kv_heads
    group = num_heads // num_kv_heads
    # A power of two divides a tile's rows.
    padded = 1 << (group - 1).bit_length()
    rows = COMPUTE_WGS * QUERY_ROWS
    tile = rows // padded
    align = max(1, 8 // padded)
    key = tuning_key("mosaic_gpu", "prefill", q.shape, q.dtype, kv.pages.shape, kv.pages.dtype)
    tiles = tiles or choose_prefill_tiles(head_dim, q.dtype.itemsize, kv.pages.dtype.itemsize, key)

    packing = pack_prefill(batch, num_tokens, tile=tile, align=align)
    packed = q.reshape(num_tokens, num_kv_heads, group, head_dim)[packing.token]
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    packed = packed.transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)
    work = prefill_worklist(batch, packing, num_tokens, tile=tile)
    first, end = block_range(work, batch.kv_lens, params, tiles.tile)
    num_items = work.row.shape[0]
    live = jnp.arange(num_items, dtype=jnp.int32) < work.num_items[0]
    end = jnp.where(live, end, first)
    order = jnp.argsort(first - end)  # longest first
    if sinks is None:
        sink = jnp.full((num_kv_heads, rows), _MASKED, jnp.float32)
    else:
        by_group = sinks.astype(jnp.float32).reshape(num_kv_heads, group) * _LOG2E
        by_group = jnp.pad(by_group, ((0, 0), (0, padded - group)))
        sink = jnp.tile(by_group, (1, tile))
    table = batch.block_table
    call = plgpu.kernel(
        partial(
            _kernel,
            params,
            tiles.tile,
            padded,
            table.shape[1],
            sinks is not None,
            bool(interpret),
        ),
        out_type=jax.ShapeDtypeStruct(packed.shape, q.dtype),
        scratch_types={
            "q_smem": tiled_smem((COMPUTE_WGS, QUERY_ROWS, head_dim), q.dtype),
            "out_smem": plgpu.SMEM((COMPUTE_WGS, QUERY_ROWS, out_columns(head_dim)), q.dtype),
            "sink_smem": plgpu.SMEM((COMPUTE_WGS, QUERY_ROWS), jnp.float32),
            "q_ready": plgpu.Barrier(num_arrivals=2, num_barriers=COMPUTE_WGS),
            **kv_scratch(tiles, head_dim, kv.page_size, q.dtype, kv.pages.dtype, COMPUTE_WGS),
            "turn": plgpu.Barrier(num_arrivals=COMPUTE_WGS),
        },
        grid=(num_items, num_kv_heads),
        grid_names=("item", "head"),
        num_threads=COMPUTE_WGS + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        cost_estimate=attention_cost(
            num_queries=num_tokens,
            context=table.shape[1] * kv.page_size,
            kv_reads=num_items,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            q_itemsize=q.dtype.itemsize,
            kv_itemsize=kv.pages.dtype.itemsize,
            scale_bytes=0 if kv.scales is None else kv.scales.dtype.itemsize,
        ),
        **({"interpret": interpret} if interpret else {}),
    )
    out = call(
        work.row[order],
        work.start[order],
        work.position[order],
        work.num_queries[order],
        first[order],
        end[order],
        batch.kv_lens,
        table.reshape(-1),
        sink.reshape(num_kv_heads, COMPUTE_WGS, QUERY_ROWS),
        packed,
        kv.pages,
        *(() if kv.scales is None else (kv.scales,)),
    )
    out = out.reshape(num_kv_heads, -1, padded, head_dim)[:, packing.place, :group]
    return out.transpose(1, 0, 2, 3).reshape(q.shape)


def _kernel(
    params: AttentionParams,
    tile: int,
    group: int,
    table_pages: int,
    has_sinks: bool,
    plain: bool,
    # Global memory.
    row_ref: Any,  # int32[I]
    start_ref: Any,  # int32[I]
    position_ref: Any,  # int32[I]
    num_queries_ref: Any,  # int32[I]
    first_ref: Any,  # int32[I]
    end_ref: Any,  # int32[I]
    kv_lens_ref: Any,  # int32[S]
    table_ref: Any,  # int32[S · M]
    sink_ref: Any,  # float32[Hkv, 2, 64], base 2
    q_ref: Any,  # [Hkv, A · Gp, D]
    *pool_and_output: Any,  # [N, 2, Hkv, P, D], scales [N, 2, Hkv, P] if any; [Hkv, A · Gp, D]
    q_smem: Any,  # [2, 64, D]
    out_smem: Any,  # [2, 64, columns]
    sink_smem: Any,  # float32[2, 64]
    q_ready: Any,
    turn: Any,
    **kv_refs: Any,
) -> None:
    *pools, out_ref = pool_and_output
    item, head, wg = lax.axis_index("item"), lax.axis_index("head"), lax.axis_index("wg")
    first, end = first_ref[item], end_ref[item]
    kv = kv_memory(first, kv_refs)
    copying, computing = _REGISTERS[kv.scales is not None]

    def take_turn() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    @pl.when((end > first) & (wg < COMPUTE_WGS))
    def _compute() -> None:
        plgpu.set_max_registers(computing, action="increase")
        start = pl.multiple_of(start_ref[item] * group + wg * QUERY_ROWS, 8)
        position = position_ref[item]
        kv_len = kv_lens_ref[row_ref[item]]
        plgpu.copy_gmem_to_smem(
            q_ref.at[head, pl.ds(start, QUERY_ROWS)], q_smem.at[wg], q_ready.at[wg]
        )
        plgpu.copy_gmem_to_smem(sink_ref.at[head, wg], sink_smem.at[wg], q_ready.at[wg])
        plgpu.barrier_wait(q_ready.at[wg])

        by_row = plgpu.Layout.WGMMA.reduce(1)
        if has_sinks:
            peak = plgpu.load(sink_smem.at[wg], layout=by_row)
        else:
            peak = plgpu.layout_cast(jnp.full((QUERY_ROWS,), _MASKED, jnp.float32), by_row)
        total = plgpu.layout_cast(
            jnp.full((QUERY_ROWS,), 1.0 if has_sinks else 0.0, jnp.float32), by_row
        )
        head_dim = q_smem.shape[-1]
        acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)

        pl.when(wg == 1)(take_turn)

        def one_tile(index: Any, carry: Any, *, masked: bool) -> Any:
            acc, peak, total = carry
            slot = kv.stage(index)
            plgpu.barrier_wait(kv.ready[0].at[slot])
            scores = query_key_product(q_smem.at[wg], kv.tiles[0].at[slot], plain, take_turn)
            plgpu.barrier_arrive(kv.free[0].at[slot])
            if kv.scales is not None:
                scores = scores * kv.scale_row(index, 0, scores.shape)
            scores, scale = softcap_scores(scores, params)
            if masked:
                key = index * tile + plgpu.broadcasted_iota(
                    jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA
                )
                query = wg * QUERY_ROWS + plgpu.broadcasted_iota(
                    jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA
                )
                query = position + lax.shift_right_logical(query, jnp.int32(group.bit_length() - 1))
                visible = (key <= query) & (key < kv_len)
                if params.sliding_window is not None:
                    visible &= key > query - params.sliding_window
                scores = jnp.where(visible, scores, _MASKED)
            new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
            shrink = jnp.exp2(peak - new_peak)
            weight = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
            if masked and params.sliding_window is not None:
                # A query may see nothing of this tile and nothing before it: its peak is the mask.
                weight = jnp.where(visible, weight, 0.0)
            total = total * shrink + weight.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
            if kv.scales is not None:
                weight = weight * kv.scale_row(index, 1, weight.shape)
            weight = weight.astype(q_smem.dtype)
            if not plain:
                acc, total, new_peak, weight = lax.optimization_barrier(
                    (acc, total, new_peak, weight)
                )
            plgpu.barrier_arrive(turn)  # The tensor cores are the other warpgroup's.
            plgpu.barrier_wait(kv.ready[1].at[slot])
            plgpu.barrier_wait(turn)
            acc = accumulate(acc, weight, kv.tiles[1].at[slot], plain)
            plgpu.barrier_arrive(kv.free[1].at[slot])
            return acc, new_peak, total

        # Tiles before `whole` are seen by every query; with a window, none is sure to be.
        whole = lax.div(jnp.minimum(position + 1, kv_len), jnp.int32(tile))
        if params.sliding_window is not None:
            whole = first
        whole = jnp.clip(whole, first, end)
        carry = (acc, peak, total)
        carry = lax.fori_loop(first, whole, partial(one_tile, masked=False), carry)
        acc, peak, total = lax.fori_loop(whole, end, partial(one_tile, masked=True), carry)
        pl.when(wg == 0)(take_turn)

        total = jnp.maximum(total, 1e-30)
        out = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(out_smem.dtype)
        num_rows = num_queries_ref[item] * group - wg * QUERY_ROWS
        width = out_smem.shape[-1]
        for column in range(0, head_dim, width):
            here = slice(column, column + width)
            out_smem[wg] = out[:, here]
            plgpu.commit_smem()

            @pl.when(num_rows >= QUERY_ROWS)
            def _whole(here: slice = here) -> None:
                plgpu.copy_smem_to_gmem(
                    out_smem.at[wg],
                    out_ref.at[head, pl.ds(start, QUERY_ROWS), here],
                    commit_group=False,
                )

            # What follows a part of a tile belongs to the next row, which another block writes.
            @pl.when(num_rows < QUERY_ROWS)
            def _part(here: slice = here) -> None:
                @pl.loop(0, jnp.maximum(num_rows, 0))
                def _one_row(i: Any) -> None:
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[wg, pl.ds(i, 1)],
                        out_ref.at[head, pl.ds(start + i, 1), here],
                        commit_group=False,
                    )

            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0)

    @pl.when((end > first) & (wg == COMPUTE_WGS))
    def _copies() -> None:
        plgpu.set_max_registers(copying, action="decrease")
        source = PagedTiles(
            pools=tuple(pools),
            table=table_ref,
            table_row=row_ref[item] * table_pages,
            table_pages=table_pages,
            head=head,
            tile=tile,
        )
        kv.copy_all(source, end)
