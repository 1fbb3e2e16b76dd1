"""Ragged paged attention for TPUs (Pallas Mosaic): one kernel walks a worklist of query tiles.

Decode, prefill and mixed steps are specialisations of the same kernel: a decode item is one row's
token, a prefill item a tile of one row's chunk; a mixed step is one call of each, writing disjoint
tokens. For each item the kernel walks the row's KV in blocks of pages with an online softmax
(Source: Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). Page copies are
double-buffered across the whole worklist: while one block is computed the next is on its way, be
it the same item's or the next one's. A page [2, Hkv, P, D] is one contiguous copy for all heads;
heads of 64 have a key and its value in one row of lanes, [1, Hkv, P, 128]. Of latents [1, 1, P, D]
the values are the first lanes of keys, and all query heads are one group.

Grouped queries are rows of one matrix product: [tile · G, D] × [D, block] a KV head. Pages of int8
and fp8 come with their scales, a second copy beside each page's: see `block_tpu` for what is done
with a block.

Speed on hardware: not yet measured. See docs/kernels/ragged_paged_attention.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo.pallas_kernels.ragged_paged_attention.batch import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
)
from octavo.pallas_kernels.ragged_paged_attention.block_tpu import (
    MASKED,
    KernelShape,
    add_block,
    each_head,
    lay_scales,
    zero_tail,
)
from octavo.pallas_kernels.ragged_paged_attention.cost import attention_cost
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import SCALE_DTYPE
from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import (
    LANES,
    TpuTiles,
    choose_tpu_tiles,
    whole_lanes,
)
from octavo.pallas_kernels.ragged_paged_attention.worklist import (
    Worklist,
    block_range,
    decode_worklist,
    pack_prefill,
    prefill_worklist,
)


def attend_mosaic_tpu(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    *,
    sinks: jax.Array | None = None,
    decode_only: bool = False,
    tiles: TpuTiles | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Attention of packed queries over their rows' pages.

    Args:
        q: [T, Hq, D] packed queries, bfloat16 or float32.
        kv: pool [N, 2, Hkv, P, D], or [N, 1, Hkv, P, 2·D], in q's dtype, int8 or fp8, the step's
            own KV already written; or likewise [N, 1, Hkv, P, D] of keys alone, whose values, if
            they are int8 or fp8, are whole tiles of lanes.
        batch: see `RaggedBatch`.
        params: see `AttentionParams`.
        sinks: float32[Hq] a logit each head adds to the softmax's denominator; None is none.
        decode_only: every row has one token (T = S): leaves the prefill half out.
        tiles: block sizes; None computes them from the device's VMEM.
        interpret: run in Pallas' interpreter: True, or `pltpu.InterpretParams`.

    Returns:
        [T, Hq, D] in q's dtype, D as many lanes as values take; zeros for padding tokens and idle
        rows.
    """
    if tiles is None:
        tiles = choose_tpu_tiles(
            q.shape, q.dtype, kv.pages.shape, kv.pages.dtype, value_size=kv.value_size
        )
    own_dim = q.shape[2]
    if kv.in_one_row:  # zeros meet the values in a row, and outputs come where values lie
        q = jnp.pad(q, ((0, 0), (0, 0), (0, own_dim)))
    num_tokens, num_heads, head_dim = q.shape
    value_dim = min(head_dim, whole_lanes(kv.value_size or head_dim))
    num_kv_heads = kv.num_kv_heads
    group = num_heads // num_kv_heads
    table_pages = batch.block_table.shape[1]
    shape = KernelShape(
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        halves=kv.pages.shape[1],
        page_size=kv.page_size,
        pages=min(tiles.decode_pages, table_pages),
        tile=1,
        packed=False,
        params=params,
        unrolled=not interpret,
    )
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim)
    call = functools.partial(_call, kv=kv, batch=batch, sinks=sinks, interpret=interpret)
    out = call(shape, grouped, decode_worklist(batch), name="decode", vmem_bytes=tiles.vmem_bytes)
    out = out.reshape(num_tokens, num_heads, value_dim)
    live = batch.kv_lens[batch.token_row] > 0
    live &= jnp.arange(num_tokens, dtype=jnp.int32) < batch.cu_q_lens[batch.num_rows]
    if not decode_only:
        # Rows of a packed tile start on whole sublane tiles of q's dtype.
        align = _query_align(q.dtype, group)
        tile = -(-tiles.prefill_tile // align) * align
        packing = pack_prefill(batch, num_tokens, tile=tile, align=align)
        packed = grouped[packing.token].transpose(1, 0, 2, 3)
        packed = packed.reshape(num_kv_heads, -1, head_dim)
        work = prefill_worklist(batch, packing, num_tokens, tile=tile)
        pages = min(tiles.prefill_pages, table_pages)
        shape = dataclasses.replace(shape, pages=pages, tile=tile, packed=True)
        chunk = call(shape, packed, work, name="prefill", vmem_bytes=tiles.vmem_bytes)
        chunk = chunk.reshape(num_kv_heads, -1, group, value_dim)[:, packing.place]
        chunk = chunk.transpose(1, 0, 2, 3).reshape(out.shape)
        is_decode = batch.token_row < batch.num_decode_rows
        out = jnp.where(is_decode[:, None, None], out, chunk)
    if kv.in_one_row:
        out = out[:, :, -own_dim:]
    return jnp.where(live[:, None, None], out, 0)


def _query_align(dtype: Any, group: int) -> int:
    """Tokens such that so many rows of `group` queries fill whole sublane tiles."""
    sublanes = 8 * 4 // jnp.dtype(dtype).itemsize
    align = 1
    while align * group % sublanes:
        align *= 2
    return align


def _call(
    shape: KernelShape,
    q: jax.Array,
    work: Worklist,
    *,
    kv: PagedKV,
    batch: RaggedBatch,
    sinks: jax.Array | None,
    interpret: Any,
    name: str,
    vmem_bytes: int,
) -> jax.Array:
    first, end = block_range(work, batch.kv_lens, shape.params, shape.block)
    heads, queries = shape.num_kv_heads, shape.queries
    if sinks is None:
        sink_rows = jnp.full((heads, queries, LANES), MASKED, jnp.float32)
    else:
        by_group = jnp.tile(sinks.astype(jnp.float32).reshape(heads, shape.group), (1, shape.tile))
        sink_rows = jnp.broadcast_to(by_group[:, :, None], (heads, queries, LANES))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    # A block that is walked to its end; the first number of items is a guess at half the bound.
    cost = attention_cost(
        num_queries=work.row.shape[0] * shape.tile,
        context=batch.block_table.shape[1] * shape.page_size,
        kv_reads=work.row.shape[0],
        num_heads=heads * shape.group,
        num_kv_heads=heads,
        head_dim=kv.head_dim,
        value_size=kv.value_size,
        q_itemsize=q.dtype.itemsize,
        kv_itemsize=kv.pages.dtype.itemsize,
        scale_bytes=0 if kv.scales is None else SCALE_DTYPE.itemsize,
    )
    block = (2, shape.pages)  # twice: one is computed while the other is on its way
    pools = [kv.pages]
    buffers = [pltpu.VMEM((*block, *kv.pages.shape[1:]), kv.pages.dtype)]
    scale_rows = []
    if kv.scales is not None:
        pools.append(kv.scales)
        buffers.append(pltpu.VMEM((*block, *kv.scales.shape[1:]), kv.scales.dtype))
        scale_rows.append(pltpu.VMEM((2, heads, shape.scale_lanes), jnp.float32))
    stats = pltpu.VMEM((heads, queries, LANES), jnp.float32)
    call = pl.pallas_call(
        functools.partial(_kernel, shape, sinks is not None),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:-1], shape.value_dim), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=9,
            grid=(1,),
            in_specs=[
                pl.BlockSpec((heads, queries, LANES), lambda *_: (0, 0, 0)),
                anywhere,
                tuple(anywhere for _ in pools),
            ],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((2, heads, queries, shape.head_dim), q.dtype),
                pltpu.VMEM((heads, queries, shape.value_dim), q.dtype),
                tuple(buffers),
                tuple(scale_rows),
                stats,
                stats,
                pltpu.VMEM((heads, queries, shape.value_dim), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=vmem_bytes),
        cost_estimate=cost,
        name=f"ragged_paged_attention_{name}",
        interpret=interpret,
    )
    return call(
        work.num_items,
        work.row,
        work.start,
        work.position,
        work.num_queries,
        first,
        end,
        batch.kv_lens,
        batch.block_table.reshape(-1),
        sink_rows,
        q,
        tuple(pools),
    )


def _kernel(
    shape: KernelShape,
    has_sinks: bool,
    # Scalars in SMEM.
    num_items_ref: Any,  # [1]
    row_ref: Any,  # [I]
    start_ref: Any,  # [I]
    position_ref: Any,  # [I]
    num_queries_ref: Any,  # [I]
    first_ref: Any,  # [I]
    end_ref: Any,  # [I]
    kv_lens_ref: Any,  # [S]
    table_ref: Any,  # [S · M]
    # Inputs and the output.
    sink_ref: Any,  # VMEM [Hkv, Q, LANES]
    q_ref: Any,  # HBM [Hkv, A · G, D] or [T, Hkv, G, D]
    pool_refs: Any,  # HBM [N, halves, Hkv, P, D], and scales [N, 2, Hkv, P'] if any
    out_ref: Any,  # HBM as q, V wide
    # Scratch.
    q_buf: Any,  # VMEM [2, Hkv, Q, D]
    out_buf: Any,  # VMEM [Hkv, Q, V]
    kv_bufs: Any,  # VMEM [2, pages, halves, Hkv, P, D], and [2, pages, 2, Hkv, P'] if any
    scale_rows: Any,  # VMEM [2, Hkv, scale_lanes] if any
    peak_ref: Any,  # VMEM [Hkv, Q, LANES], every lane alike
    total_ref: Any,  # VMEM [Hkv, Q, LANES], every lane alike
    acc_ref: Any,  # VMEM [Hkv, Q, V]
    q_sems: Any,
    out_sem: Any,
    kv_sems: Any,
) -> None:
    num_items = num_items_ref[0]
    table_pages = table_ref.shape[0] // kv_lens_ref.shape[0]
    queries, block = shape.queries, shape.block

    def rows_of(ref: Any, item: Any) -> Any:
        start = start_ref[item]
        if not shape.packed:
            return ref.at[start]
        sublanes = 8 * 4 // q_buf.dtype.itemsize
        first = pl.multiple_of(start * shape.group, sublanes)
        return ref.at[:, pl.ds(first, queries)]

    def q_copy(item: Any) -> Any:
        slot = lax.rem(item, 2)
        return pltpu.make_async_copy(rows_of(q_ref, item), q_buf.at[slot], q_sems.at[slot])

    def out_copy(item: Any) -> Any:
        return pltpu.make_async_copy(out_buf, rows_of(out_ref, item), out_sem)

    def each_page(item: Any, index: Any, slot: Any, do: Callable[[Any], None]) -> None:
        row = row_ref[item]
        num_pages = lax.div(kv_lens_ref[row] + shape.page_size - 1, shape.page_size)
        first = index * shape.pages

        def one(i: Any, _: None) -> None:
            page = table_ref[row * table_pages + first + i]
            for pool, buf in zip(pool_refs, kv_bufs, strict=True):
                do(pltpu.make_async_copy(pool.at[page], buf.at[slot, i], kv_sems.at[slot]))

        lax.fori_loop(0, jnp.minimum(shape.pages, num_pages - first), one, None)

    def fetch(item: Any, index: Any, slot: Any) -> None:
        each_page(item, index, slot, lambda copy: copy.start())

    @pl.when(num_items > 0)
    def _first() -> None:
        q_copy(0).start()
        fetch(0, first_ref[0], 0)

    def one_item(item: Any, slot: Any) -> Any:
        has_next = item + 1 < num_items

        @pl.when(has_next)
        def _next_queries() -> None:
            q_copy(item + 1).start()

        q_copy(item).wait()
        peak_ref[...] = sink_ref[...]
        total_ref[...] = jnp.full_like(total_ref, 1.0 if has_sinks else 0.0)
        acc_ref[...] = jnp.zeros_like(acc_ref)
        end = end_ref[item]
        position = position_ref[item]
        kv_len = kv_lens_ref[row_ref[item]]
        q_slot = lax.rem(item, 2)

        def one_block(index: Any, slot: Any) -> Any:
            @pl.when(index + 1 < end)
            def _next_block() -> None:
                fetch(item, index + 1, 1 - slot)

            @pl.when((index + 1 == end) & has_next)
            def _next_item() -> None:
                fetch(item + 1, first_ref[item + 1], 1 - slot)

            each_page(item, index, slot, lambda copy: copy.wait())
            zero_tail(shape, kv_bufs[0].at[slot], kv_len - index * block)
            if scale_rows:
                lay_scales(shape, kv_bufs[1].at[slot], scale_rows[0], kv_len - index * block)
            inside = (index + 1) * block <= position + 1
            if not shape.params.sees_all:
                last = position + (shape.tile - 1)
                inside &= index * block >= shape.params.first_visible_of_tile(last, last)

            compute = functools.partial(
                add_block,
                shape,
                q_buf.at[q_slot],
                kv_bufs[0].at[slot],
                scale_rows[0] if scale_rows else None,
                peak_ref,
                total_ref,
                acc_ref,
                index * block,
                position,
                kv_len,
            )
            if shape.tile == 1 and shape.params.sees_all:
                compute(masked=True)  # one mask a block is cheaper than a second body
            else:
                pl.when(inside)(functools.partial(compute, masked=False))
                pl.when(jnp.logical_not(inside))(functools.partial(compute, masked=True))
            return 1 - slot

        slot = lax.fori_loop(first_ref[item], end, one_block, slot)

        @pl.when(item > 0)
        def _previous_written() -> None:
            # Tiles overlap the next row's first one with garbage: writes keep their order.
            out_copy(item - 1).wait()

        def one_head(head: Any) -> None:
            total = jnp.maximum(total_ref[head][:, :1], 1e-30)
            out_buf[head] = (acc_ref[head] / total).astype(out_buf.dtype)

        each_head(shape, one_head)
        out_copy(item).start()
        return slot

    lax.fori_loop(0, num_items, one_item, jnp.int32(0))

    @pl.when(num_items > 0)
    def _last() -> None:
        out_copy(num_items - 1).wait()
