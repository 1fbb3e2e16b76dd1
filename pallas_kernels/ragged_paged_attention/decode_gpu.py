"""Decode attention for Hopper: a persistent grid over split KV, page-sized bulk copies, a combine.

A program a place on the GPU, and to each an equal share of all KV tiles of all rows and heads (see
`shares`): a long row is cut where shares end, so that all of the GPU's multiprocessors have work
whatever the lengths are (Source: Flash-Decoding; Dao et al. 2023). One warpgroup copies pages with
the bulk tensor engine, `num_stages` tiles ahead, over the ends of rows too; the others compute: all
G query heads that share the KV head are rows of one matrix product, padded to the 64 rows that
wgmma takes. Where there are two, they take the share's tiles in turn, each with sums of its own: a
tile's products and softmax come one after the other, and one warpgroup alone would be busy about as
long as its bytes are on their way. Partial results leave in float32 with their log-sum-exp; a
second kernel weighs and adds them, always in one order, and writes rows as the model reads them
(`combine_gpu`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from octavo.pallas_kernels.compat import mosaic_gpu_options
from octavo.pallas_kernels.hopper import tiled_smem
from octavo.pallas_kernels.ragged_paged_attention.batch import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
)
from octavo.pallas_kernels.ragged_paged_attention.combine_gpu import combine_gpu
from octavo.pallas_kernels.ragged_paged_attention.copies_gpu import (
    PagedItems,
    kv_memory,
    kv_scratch,
)
from octavo.pallas_kernels.ragged_paged_attention.cost import attention_cost
from octavo.pallas_kernels.ragged_paged_attention.shares import (
    Segment,
    Shares,
    ShareWalk,
    share_tiles,
)
from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import (
    DecodeTiles,
    accumulate,
    choose_decode_tiles,
    decode_columns,
    query_key_product,
    softcap_scores,
)
from octavo.pallas_kernels.ragged_paged_attention.worklist import (
    block_range,
    decode_items,
    decode_worklist,
)
from octavo.pallas_kernels.tuning import tuning_key

_MASKED = -1e30
QUERY_ROWS = 64
"""Rows of a wgmma tile."""
_REGISTERS = 80, 168
"""Of a copying and of a computing warpgroup, where there are two of each."""


def decode_gpu(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    *,
    sinks: jax.Array | None = None,
    decode_only: bool = False,
    tiles: DecodeTiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of decode rows.

    Args:
        q: [T, Hq, D] bfloat16; row s reads token `cu_q_lens[s]`.
        kv, batch, params, sinks, interpret: see `attend_mosaic_gpu`.
        decode_only: row s reads token s (T = S).
        tiles: block sizes; None takes the measured or computed ones of the shape.

    Returns:
        [S, Hq, D] in q's dtype; rows that are no decode rows or idle hold zeros.
    """
    num_rows = batch.kv_lens.shape[0]
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.num_kv_heads
    group = num_heads // num_kv_heads
    padded = -(-group // 8) * 8
    key = tuning_key("mosaic_gpu", "decode", q.shape, q.dtype, kv.pages.shape, kv.pages.dtype)
    tiles = tiles or choose_decode_tiles(head_dim, q.dtype.itemsize, kv.pages.dtype.itemsize, key)
    work = decode_worklist(batch)
    first, end = block_range(work, batch.kv_lens, params, tiles.tile)
    live = jnp.arange(num_rows, dtype=jnp.int32) < work.num_items[0]
    shares = share_tiles(
        jnp.where(live, end - first, 0),
        num_heads=num_kv_heads,
        num_programs=tiles.num_programs,
        least=tiles.min_tiles,
    )
    # A program that begins in a row that another began takes a place more than the row's own.
    num_parts = num_rows + -(-tiles.num_programs // num_kv_heads)
    num_wgs = tiles.num_warpgroups

    rows = q if decode_only else q[jnp.minimum(batch.cu_q_lens[:-1], q.shape[0] - 1)]
    rows = rows.reshape(num_rows, num_kv_heads, group, head_dim)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    table = batch.block_table
    call = plgpu.kernel(
        partial(_kernel, params, tiles, table.shape[1], bool(interpret)),
        out_type=(
            jax.ShapeDtypeStruct(
                (num_kv_heads, num_parts * num_wgs, padded, head_dim), jnp.float32
            ),
            jax.ShapeDtypeStruct((num_kv_heads, num_parts * num_wgs, QUERY_ROWS), jnp.float32),
        ),
        scratch_types={
            "q_smem": tiled_smem((num_wgs, QUERY_ROWS, head_dim), q.dtype),
            "out_smem": plgpu.SMEM(
                (num_wgs, QUERY_ROWS, decode_columns(head_dim, num_wgs)), jnp.float32
            ),
            "lse_smem": plgpu.SMEM((num_wgs, QUERY_ROWS), jnp.float32),
            "q_ready": plgpu.Barrier(num_barriers=num_wgs),
            **kv_scratch(tiles, head_dim, kv.page_size, q.dtype, kv.pages.dtype, 1),
        },
        grid=(tiles.num_programs,),
        grid_names=("program",),
        num_threads=num_wgs + tiles.num_copiers,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic_gpu_options(
            attention_cost(
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
            interpret,
        ),
    )
    part, lse = call(
        shares.plan,
        shares.head_first,
        work.row,
        first,
        end,
        batch.kv_lens,
        table.reshape(-1),
        rows,
        kv.pages,
        *(() if kv.scales is None else (kv.scales,)),
    )
    begin, stop = part_places(shares, decode_items(batch))
    begin, stop = begin * num_wgs, stop * num_wgs
    return combine_gpu(
        part, lse, begin, stop, group=group, dtype=q.dtype, sinks=sinks, interpret=interpret
    )


def part_places(shares: Shares, item: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Places [begin, end) of each row's parts, int32[Hkv, S] both; equal where it has none.

    Args:
        item: int32[S] each row's item, or -1.
    """
    base = item - shares.head_first[:, None]
    begin = base + shares.first[:, item]
    return begin, jnp.where(item < 0, begin, base + shares.last[:, item] + 1)


def _kernel(
    params: AttentionParams,
    tiles: DecodeTiles,
    table_pages: int,
    plain: bool,
    # Global memory.
    plan_ref: Any,  # see `Shares`
    head_first_ref: Any,  # int32[Hkv]
    row_ref: Any,  # int32[I]
    first_ref: Any,  # int32[I]
    end_ref: Any,  # int32[I]
    kv_lens_ref: Any,  # int32[S]
    table_ref: Any,  # int32[S · M]
    q_ref: Any,  # [S, Hkv, Gp, D]
    *pool_and_outputs: Any,  # [N, 2, Hkv, P, D], scales [N, 2, Hkv, P] if any; then
    # float32[Hkv, W · I, Gp, D] and float32[Hkv, W · I, 64]
    q_smem: Any,  # [W, 64, D]
    out_smem: Any,  # float32[W, 64, columns]
    lse_smem: Any,  # float32[W, 64]
    q_ready: Any,
    **kv_refs: Any,
) -> None:
    *pools, out_ref, lse_ref = pool_and_outputs
    program, wg = lax.axis_index("program"), lax.axis_index("wg")
    padded, head_dim = q_ref.shape[2:]
    num_wgs = q_smem.shape[0]
    kv = kv_memory(kv_refs)
    walk = ShareWalk(plan_ref=plan_ref, first_ref=first_ref, end_ref=end_ref, program=program)

    tile = tiles.tile
    shares_registers = tiles.num_copiers + num_wgs > 3  # of fewer, each has enough
    items = PagedItems(
        pools=tuple(pools), table=table_ref, rows=row_ref, table_pages=table_pages, tile=tile
    )
    for copier, halves in enumerate(tiles.copied_halves):

        @pl.when((walk.num_tiles > 0) & (wg == num_wgs + copier))
        def _copies(halves: tuple[int, ...] = halves) -> None:
            if shares_registers:
                plgpu.set_max_registers(_REGISTERS[0], action="decrease")
            kv.copy_share(walk, items, halves=halves)

    def one_segment(segment: Segment) -> None:
        row, head = row_ref[segment.item], segment.head
        kv_len = kv_lens_ref[row]
        plgpu.copy_gmem_to_smem(
            q_ref.at[row, head], q_smem.at[wg, pl.ds(0, padded)], q_ready.at[wg]
        )
        plgpu.barrier_wait(q_ready.at[wg])
        # Of the share's tiles, every one whose place leaves this warpgroup's number.
        ahead = lax.rem(wg + num_wgs - lax.rem(segment.done, jnp.int32(num_wgs)), num_wgs)
        first = segment.first + ahead
        count = lax.div(jnp.maximum(segment.end - first, 0) + num_wgs - 1, jnp.int32(num_wgs))

        by_row = plgpu.Layout.WGMMA.reduce(1)
        peak = plgpu.layout_cast(jnp.full((QUERY_ROWS,), _MASKED, jnp.float32), by_row)
        total = plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), by_row)
        acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)

        def one_tile(turn: Any, carry: Any) -> Any:
            acc, peak, total = carry
            index = first + turn * num_wgs
            step = segment.step(index)
            slot = kv.stage(step)
            plgpu.barrier_wait(kv.ready[0].at[slot])
            scores = query_key_product(q_smem.at[wg], kv.tiles[0].at[slot], plain)
            plgpu.barrier_arrive(kv.free[0].at[slot])
            if kv.scales is not None:
                scores = scores * kv.scale_row(step, 0, scores.shape)
            scores, scale = softcap_scores(scores, params)
            key = index * tile + plgpu.broadcasted_iota(
                jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA
            )
            visible = key < kv_len
            if not params.sees_all:
                visible &= key >= params.first_visible_of_tile(kv_len - 1, kv_len - 1)
            scores = jnp.where(visible, scores, _MASKED)
            new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
            shrink = jnp.exp2(peak - new_peak)
            weight = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_peak, scores.shape, [0]))
            total = total * shrink + weight.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
            if kv.scales is not None:
                weight = weight * kv.scale_row(step, 1, weight.shape)
            plgpu.barrier_wait(kv.ready[1].at[slot])
            acc = accumulate(acc, weight.astype(q_smem.dtype), kv.tiles[1].at[slot], plain)
            plgpu.barrier_arrive(kv.free[1].at[slot])
            return acc, new_peak, total

        acc, peak, total = lax.fori_loop(jnp.int32(0), count, one_tile, (acc, peak, total))
        total = jnp.maximum(total, 1e-30)  # of no tile: zeros, which weigh nothing
        out = acc / lax.broadcast_in_dim(total, acc.shape, [0])
        place = (segment.item + program - head_first_ref[head]) * num_wgs + wg
        plgpu.wait_smem_to_gmem(0)  # what the segment before left has been read
        lse_smem[wg] = peak + jnp.log2(total)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(lse_smem.at[wg], lse_ref.at[head, place])
        width = out_smem.shape[-1]
        for column in range(0, head_dim, width):
            here = slice(column, column + width)
            if column:
                plgpu.wait_smem_to_gmem(0)
            out_smem[wg] = out[:, here]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_smem.at[wg, pl.ds(0, padded)], out_ref.at[head, place, :, here]
            )

    @pl.when((walk.num_tiles > 0) & (wg < num_wgs))
    def _compute() -> None:
        if shares_registers:
            plgpu.set_max_registers(_REGISTERS[1], action="increase")
        # Rows of the tile beyond the group are zeros: their scores are too, and nobody reads them.
        q_smem[wg] = plgpu.layout_cast(
            jnp.zeros((QUERY_ROWS, head_dim), q_smem.dtype), plgpu.Layout.WGMMA
        )
        plgpu.commit_smem()
        walk.each(one_segment)
        plgpu.wait_smem_to_gmem(0)
