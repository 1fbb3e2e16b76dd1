"""Prefill and mixed attention for Hopper: a persistent grid, warp-specialised wgmma.

A work item is a tile of one row's chunk and one KV head: 128 rows of packed queries (tokens ×
grouped heads), 64 for each of two computing warpgroups, while a third copies pages with the bulk
tensor engine. Both computing warpgroups share every KV tile. They take turns at the tensor cores:
one multiplies while the other does its softmax (Source: Shah et al., FlashAttention-3, arXiv
2407.08608). Tiles that every query sees whole are walked without a mask, those before (beyond a
window) and after them with one.

Each program of the grid takes an equal share of all items' KV tiles (see `shares`) and walks it to
its end: copies run ahead over the ends of items, and no program is left alone with a long one. An
item that is cut where a share ends leaves in parts, with their log-sum-exp, which XLA weighs; whole
ones leave as they are. Parts are rounded as outputs are: their rounding weighs no more than theirs.

The file is a long one because the body of the kernel is one function of closures: the warpgroups
share its references and barriers, and are read side by side.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
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
from octavo.pallas_kernels.ragged_paged_attention.copies_gpu import (
    PagedItems,
    kv_memory,
    kv_scratch,
)
from octavo.pallas_kernels.ragged_paged_attention.cost import attention_cost
from octavo.pallas_kernels.ragged_paged_attention.shares import (
    WALK_FIELDS,
    Segment,
    ShareWalk,
    share_tiles,
)
from octavo.pallas_kernels.ragged_paged_attention.tiles_gpu import (
    PrefillTiles,
    accumulate,
    choose_prefill_tiles,
    out_columns,
    prefill_warpgroups,
    query_key_product,
    softcap_scores,
)
from octavo.pallas_kernels.ragged_paged_attention.worklist import (
    block_range,
    pack_prefill,
    prefill_worklist,
)
from octavo.pallas_kernels.tuning import tuning_key

_MASKED = -1e30
_LEAST = -1e20
"""Of the peak that weights are taken from: of a query that has seen nothing yet, all are 0."""
_LOG2E = math.log2(math.e)
QUERY_ROWS = 64
"""Rows of packed queries of one warpgroup."""
MAX_PARTS = 8
"""Of an item; more would cost more to combine than they spare."""
_REGISTERS = {(False, 1): (40, 232), (True, 1): (72, 216), (True, 2): (72, 184)}
"""Of a copying warpgroup and of one of two computing ones, by whether it widens and how many copy.
A single computing one shares alike."""


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
    num_wgs = prefill_warpgroups(head_dim, is_narrow=kv.pages.dtype.itemsize < q.dtype.itemsize)
    rows = num_wgs * QUERY_ROWS
    tile = rows // padded
    align = max(1, 8 // padded)
    key = tuning_key("mosaic_gpu", "prefill", q.shape, q.dtype, kv.pages.shape, kv.pages.dtype)
    tiles = tiles or choose_prefill_tiles(head_dim, q.dtype.itemsize, kv.pages.dtype.itemsize, key)

    # Worked out once a step: XLA would repeat it for every number that is packed or unpacked.
    packing = lax.optimization_barrier(pack_prefill(batch, num_tokens, tile=tile, align=align))
    packed = q.reshape(num_tokens, num_kv_heads, group, head_dim)[packing.token]
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, padded - group), (0, 0)))
    packed = packed.transpose(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)
    work = prefill_worklist(batch, packing, num_tokens, tile=tile)
    first, end = block_range(work, batch.kv_lens, params, tiles.tile)
    live = jnp.arange(work.row.shape[0], dtype=jnp.int32) < work.num_items[0]
    shares = share_tiles(
        jnp.where(live, end - first, 0),
        num_heads=num_kv_heads,
        num_programs=tiles.num_programs,
        least=tiles.min_tiles,
        most_parts=MAX_PARTS,
    )
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
            tiles,
            padded,
            table.shape[1],
            sinks is not None,
            bool(interpret),
        ),
        out_type=(
            jax.ShapeDtypeStruct(packed.shape, q.dtype),
            # Of each program: what it ends of another's item, and what it begins of one.
            jax.ShapeDtypeStruct((tiles.num_programs * 2, num_wgs, QUERY_ROWS, head_dim), q.dtype),
            jax.ShapeDtypeStruct((tiles.num_programs * 2, num_wgs, QUERY_ROWS), jnp.float32),
        ),
        scratch_types={
            "q_smem": tiled_smem((num_wgs, QUERY_ROWS, head_dim), q.dtype),
            "out_smem": plgpu.SMEM((num_wgs, QUERY_ROWS, out_columns(head_dim)), q.dtype),
            "sink_smem": plgpu.SMEM((num_wgs, QUERY_ROWS), jnp.float32),
            "lse_smem": plgpu.SMEM((num_wgs, QUERY_ROWS), jnp.float32),
            "walk_smem": plgpu.SMEM((num_wgs + 1, WALK_FIELDS), jnp.int32),
            "q_ready": plgpu.Barrier(num_arrivals=2, num_barriers=num_wgs),
            **kv_scratch(tiles, head_dim, kv.page_size, q.dtype, kv.pages.dtype, num_wgs),
            "turn": plgpu.Barrier(num_arrivals=num_wgs),
        },
        grid=(tiles.num_programs,),
        grid_names=("program",),
        num_threads=num_wgs + tiles.num_copiers,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **mosaic_gpu_options(
            attention_cost(
                num_queries=num_tokens,
                context=table.shape[1] * kv.page_size,
                kv_reads=work.row.shape[0],
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
    out, part, lse = call(
        shares.plan,
        work.row,
        work.start,
        work.position,
        work.num_queries,
        first,
        end,
        batch.kv_lens,
        table.reshape(-1),
        sink.reshape(num_kv_heads, num_wgs, QUERY_ROWS),
        packed,
        kv.pages,
        *(() if kv.scales is None else (kv.scales,)),
    )
    out = out.reshape(num_kv_heads, -1, padded, head_dim)[:, packing.place, :group]
    whole = _combine(
        part.reshape(-1, 2, rows, head_dim), lse.reshape(-1, 2, rows), shares.num_parts
    ).reshape(-1, tile, padded, head_dim)
    owner = jnp.where(shares.last > shares.first, shares.first, -1)[:, packing.item]  # [Hkv, T]
    owner, whole = lax.optimization_barrier((owner, whole))
    combined = whole[owner, packing.within][:, :, :group]
    out = jnp.where(owner[..., None, None] >= 0, combined, out)
    return out.transpose(1, 0, 2, 3).reshape(q.shape)


def _combine(part: jax.Array, lse: jax.Array, num_parts: jax.Array) -> jax.Array:
    """Weighs the parts of items that were cut, by their log-sum-exp.

    An item that program p begins lies in its second part, and in the first ones of those that
    follow: parts are added as shifted arrays, without a gather.

    Args:
        part: [P, 2, 128, D] normalised; garbage where no program wrote.
        lse: float32[P, 2, 128] base-2 logarithms of denominators.
        num_parts: int32[P], see `Shares`.

    Returns:
        [P, 128, D] of the item that each program began and others ended; garbage elsewhere.
    """
    num_programs = part.shape[0]
    beyond = ((0, MAX_PARTS),) + ((0, 0),) * 2
    follow_lse = jnp.pad(lse[:, 0], beyond[:2])
    follow = jnp.pad(part[:, 0], beyond)

    def shifted(array: jax.Array, k: int) -> jax.Array:
        return lax.slice_in_dim(array, k, k + num_programs)

    def exists(k: int) -> jax.Array:
        return (num_parts > k)[:, None]

    each = [jnp.where(exists(0), lse[:, 1], 0.0)]
    each += [jnp.where(exists(k), shifted(follow_lse, k), _MASKED) for k in range(1, MAX_PARTS)]
    peak = functools.reduce(jnp.maximum, each)
    weights = [jnp.exp2(one - peak) for one in each]
    total = functools.reduce(jnp.add, weights)[..., None]
    out = weights[0][..., None] * jnp.where(exists(0)[..., None], part[:, 1], 0)
    for k in range(1, MAX_PARTS):
        one = jnp.where(exists(k)[..., None], shifted(follow, k), 0)
        out = out + weights[k][..., None] * one
    return (out / total).astype(part.dtype)


def _kernel(
    params: AttentionParams,
    tiles: PrefillTiles,
    group: int,
    table_pages: int,
    has_sinks: bool,
    plain: bool,
    # Global memory.
    plan_ref: Any,  # see `Shares`
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
    *pool_and_outputs: Any,  # [N, 2, Hkv, P, D], scales [N, 2, Hkv, P] if any; then
    # [Hkv, A · Gp, D], parts [2P, 2, 64, D] and float32[2P, 2, 64]
    q_smem: Any,  # [2, 64, D]
    out_smem: Any,  # [2, 64, columns]
    sink_smem: Any,  # float32[2, 64]
    lse_smem: Any,  # float32[2, 64]
    walk_smem: Any,  # int32[3, fields]
    q_ready: Any,
    turn: Any,
    **kv_refs: Any,
) -> None:
    *pools, out_ref, part_ref, lse_ref = pool_and_outputs
    program, wg = lax.axis_index("program"), lax.axis_index("wg")
    kv = kv_memory(kv_refs)
    num_wgs, _, head_dim = q_smem.shape
    tile, num_copiers = tiles.tile, tiles.num_copiers
    copying, computing = _REGISTERS[kv.scales is not None, num_copiers]
    walk = ShareWalk(plan_ref=plan_ref, first_ref=first_ref, end_ref=end_ref, program=program)

    def take_turn() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def first_row(item: Any) -> Any:
        return pl.multiple_of(start_ref[item] * group + wg * QUERY_ROWS, 8)

    def attend(read: Callable[[], Segment]) -> Any:
        segment = read()
        item, head = segment.item, segment.head
        start = first_row(item)
        plgpu.copy_gmem_to_smem(
            q_ref.at[head, pl.ds(start, QUERY_ROWS)], q_smem.at[wg], q_ready.at[wg]
        )
        plgpu.copy_gmem_to_smem(sink_ref.at[head, wg], sink_smem.at[wg], q_ready.at[wg])
        plgpu.barrier_wait(q_ready.at[wg])

        by_row = plgpu.Layout.WGMMA.reduce(1)
        total = plgpu.layout_cast(jnp.zeros((QUERY_ROWS,), jnp.float32), by_row)
        if has_sinks:
            # Of an item in parts, the first has the sink.
            begins = (segment.first == segment.whole_first).astype(jnp.float32)
            total = total + begins
            peak = plgpu.load(sink_smem.at[wg], layout=by_row) + (1.0 - begins) * _MASKED
        else:
            peak = plgpu.layout_cast(jnp.full((QUERY_ROWS,), _MASKED, jnp.float32), by_row)
        acc = plgpu.layout_cast(jnp.zeros((QUERY_ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA)

        def one_tile(segment: Segment, masked: bool, step: Any, carry: Any) -> Any:
            acc, peak, total = carry
            slot = kv.stage(step)
            plgpu.barrier_wait(kv.ready[0].at[slot])
            scores = query_key_product(q_smem.at[wg], kv.tiles[0].at[slot], plain, take_turn)
            plgpu.barrier_arrive(kv.free[0].at[slot])
            if kv.scales is not None:
                scores = scores * kv.scale_row(step, 0, scores.shape)
            scores, scale = softcap_scores(scores, params)
            if masked:
                position, kv_len = position_ref[segment.item], kv_lens_ref[row_ref[segment.item]]
                begin = (step - segment.done + segment.first) * tile
                key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
                query = wg * QUERY_ROWS + plgpu.broadcasted_iota(
                    jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA
                )
                # Of the tile's keys: what is one figure a query is worked out before it meets them.
                query = lax.shift_right_logical(query, jnp.int32(group.bit_length() - 1))
                query = query + (position - begin)
                visible = key < jnp.minimum(query + 1, kv_len - begin)
                if not params.sees_all:
                    last = position + num_wgs * QUERY_ROWS // group - 1
                    visible &= key >= params.first_visible_of_tile(query, last, begin)
                scores = jnp.where(visible, scores, _MASKED)
            new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
            shrink = jnp.exp2(peak - new_peak)
            # A query may see nothing of this tile and nothing before it: its peak is the mask. To
            # mask its weights as well would keep 64 predicates alive, which are packed into bits.
            base = jnp.maximum(new_peak, _LEAST) if masked else new_peak
            weight = jnp.exp2(scores * scale - lax.broadcast_in_dim(base, scores.shape, [0]))
            total = total * shrink + weight.sum(axis=1)
            acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
            if kv.scales is not None:
                weight = weight * kv.scale_row(step, 1, weight.shape)
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

        def first_whole(segment: Segment) -> Any:
            """The first tile that the item's last query sees from its beginning."""
            if params.sees_all:
                return segment.first
            last = position_ref[segment.item] + num_wgs * QUERY_ROWS // group - 1
            before = jnp.maximum(params.first_visible_of_tile(last, last), 0)
            whole = lax.div(before + (tile - 1), jnp.int32(tile))
            return jnp.clip(whole, segment.first, segment.end)

        def end_whole(segment: Segment) -> Any:
            """The first tile after those with nothing beyond the item's first query."""
            seen = jnp.minimum(position_ref[segment.item] + 1, kv_lens_ref[row_ref[segment.item]])
            return jnp.clip(lax.div(seen, jnp.int32(tile)), first_whole(segment), segment.end)

        def walk_tiles(segment: Segment, masked: bool, first: Any, end: Any, carry: Any) -> Any:
            steps = segment.step(first), segment.step(end)
            return lax.fori_loop(*steps, partial(one_tile, segment, masked), carry)

        carry = (acc, peak, total)
        if not params.sees_all:
            carry = walk_tiles(segment, True, segment.first, first_whole(segment), carry)
            segment = read()  # again: registers are all in use
        carry = walk_tiles(segment, False, first_whole(segment), end_whole(segment), carry)
        segment = read()
        return walk_tiles(segment, True, end_whole(segment), segment.end, carry)

    def leave(segment: Segment, carry: Any) -> None:
        acc, peak, total = carry
        item, head = segment.item, segment.head
        start = first_row(item)
        total = jnp.maximum(total, 1e-30)
        out = (acc / lax.broadcast_in_dim(total, acc.shape, [0])).astype(out_smem.dtype)
        num_rows = num_queries_ref[item] * group - wg * QUERY_ROWS
        is_end = segment.first > segment.whole_first
        is_part = is_end | (segment.end < segment.whole_end)
        place = 2 * program + jnp.where(is_end, 0, 1)
        plgpu.wait_smem_to_gmem(0)  # what the segment before left has been read
        lse_smem[wg] = peak + jnp.log2(total)
        width = out_smem.shape[-1]
        for column in range(0, head_dim, width):
            here = slice(column, column + width)
            if column:
                plgpu.wait_smem_to_gmem(0)
            out_smem[wg] = out[:, here]
            plgpu.commit_smem()

            @pl.when(is_part)
            def _share(here: slice = here, column: int = column) -> None:
                if column == 0:
                    plgpu.copy_smem_to_gmem(
                        lse_smem.at[wg], lse_ref.at[place, wg], commit_group=False
                    )
                plgpu.copy_smem_to_gmem(
                    out_smem.at[wg], part_ref.at[place, wg, :, here], commit_group=False
                )

            @pl.when(~is_part & (num_rows >= QUERY_ROWS))
            def _whole(here: slice = here) -> None:
                plgpu.copy_smem_to_gmem(
                    out_smem.at[wg],
                    out_ref.at[head, pl.ds(start, QUERY_ROWS), here],
                    commit_group=False,
                )

            # What follows a short tile belongs to the next row, which another program writes.
            @pl.when(~is_part & (num_rows < QUERY_ROWS))
            def _short(here: slice = here) -> None:
                @pl.loop(0, jnp.maximum(num_rows, 0))
                def _one_row(i: Any) -> None:
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[wg, pl.ds(i, 1)],
                        out_ref.at[head, pl.ds(start + i, 1), here],
                        commit_group=False,
                    )

            plgpu.commit_smem_to_gmem_group()

    @pl.when((walk.num_tiles > 0) & (wg < num_wgs))
    def _compute() -> None:
        if num_wgs == 1:
            walk.each_in_memory(walk_smem.at[wg], attend, leave)
        else:
            plgpu.set_max_registers(computing, action="increase")
            pl.when(wg == 1)(take_turn)
            walk.each_in_memory(walk_smem.at[wg], attend, leave)
            pl.when(wg == 0)(take_turn)
        plgpu.wait_smem_to_gmem(0)

    items = PagedItems(
        pools=tuple(pools), table=table_ref, rows=row_ref, table_pages=table_pages, tile=tile
    )
    for copier, halves in enumerate(tiles.copied_halves):

        @pl.when((walk.num_tiles > 0) & (wg == num_wgs + copier))
        def _copies(halves: tuple[int, ...] = halves) -> None:
            if num_wgs > 1:
                plgpu.set_max_registers(copying, action="decrease")
            kv.copy_share(walk, items, walk_smem.at[num_wgs], halves)
