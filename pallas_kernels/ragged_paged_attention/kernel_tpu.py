"""Ragged paged attention for TPUs (Pallas Mosaic): one kernel walks a worklist of query tiles.

Decode, prefill and mixed steps are specialisations of the same kernel: a decode item is one row's
token, a prefill item a tile of one row's chunk; a mixed step is one call of each, writing disjoint
tokens. For each item the kernel walks the row's KV in blocks of pages with an online softmax
(Source: Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). Page copies are
double-buffered across the whole worklist: while one block is computed the next is on its way, be
it the same item's or the next one's. A page [2, Hkv, P, D] is one contiguous copy for all heads.

Grouped queries are rows of one matrix product: [tile · G, D] × [D, block] a KV head.

Speed on hardware: not yet measured. See docs/kernels/ragged_paged_attention.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
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
from octavo.pallas_kernels.ragged_paged_attention.cost import attention_cost
from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import TpuTiles, choose_tpu_tiles
from octavo.pallas_kernels.ragged_paged_attention.worklist import (
    Worklist,
    block_range,
    decode_worklist,
    pack_prefill,
    prefill_worklist,
)

_MASKED = -1e30
LANES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What is static in one kernel.

    Attributes:
        group: G, query heads a KV head.
        tile: query tokens of an item; 1 for decode.
        packed: queries lie as [Hkv, A · G, D] (prefill) and not as [T, Hkv, G, D] (decode).
        pages: pages in a KV block.
        unrolled: decode's heads are unrolled.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    pages: int
    tile: int
    packed: bool
    params: AttentionParams
    unrolled: bool

    @property
    def queries(self) -> int:
        return self.tile * self.group

    @property
    def block(self) -> int:
        return self.pages * self.page_size


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
        kv: pool [N, 2, Hkv, P, D], the step's own KV already written.
        batch: see `RaggedBatch`.
        params: see `AttentionParams`.
        sinks: float32[Hq] a logit each head adds to the softmax's denominator; None is none.
        decode_only: every row has one token (T = S): leaves the prefill half out.
        tiles: block sizes; None computes them from the device's VMEM.
        interpret: run in Pallas' interpreter: True, or `pltpu.InterpretParams`.

    Returns:
        [T, Hq, D] in q's dtype; zeros for padding tokens and idle rows.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.num_kv_heads
    group = num_heads // num_kv_heads
    if tiles is None:
        tiles = choose_tpu_tiles(q.shape, q.dtype, kv.pages.shape, kv.pages.dtype)
    table_pages = batch.block_table.shape[1]
    shape = _Shape(
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
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
    out = out.reshape(q.shape)
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
        shape = _Shape(
            num_kv_heads=num_kv_heads,
            group=group,
            head_dim=head_dim,
            page_size=kv.page_size,
            pages=min(tiles.prefill_pages, table_pages),
            tile=tile,
            packed=True,
            params=params,
            unrolled=not interpret,
        )
        chunk = call(shape, packed, work, name="prefill", vmem_bytes=tiles.vmem_bytes)
        chunk = chunk.reshape(num_kv_heads, -1, group, head_dim)[:, packing.place]
        chunk = chunk.transpose(1, 0, 2, 3).reshape(q.shape)
        is_decode = batch.token_row < batch.num_decode_rows
        out = jnp.where(is_decode[:, None, None], out, chunk)
    return jnp.where(live[:, None, None], out, 0)


def _query_align(dtype: Any, group: int) -> int:
    """Tokens such that so many rows of `group` queries fill whole sublane tiles."""
    sublanes = 8 * 4 // jnp.dtype(dtype).itemsize
    align = 1
    while align * group % sublanes:
        align *= 2
    return align


def _call(
    shape: _Shape,
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
    heads, queries, dim = shape.num_kv_heads, shape.queries, shape.head_dim
    if sinks is None:
        sink_rows = jnp.full((heads, queries, LANES), _MASKED, jnp.float32)
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
        head_dim=dim,
        q_itemsize=q.dtype.itemsize,
        kv_itemsize=kv.pages.dtype.itemsize,
    )
    stats = pltpu.VMEM((heads, queries, LANES), jnp.float32)
    call = pl.pallas_call(
        functools.partial(_kernel, shape, sinks is not None),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=9,
            grid=(1,),
            in_specs=[
                pl.BlockSpec((heads, queries, LANES), lambda *_: (0, 0, 0)),
                anywhere,
                anywhere,
            ],
            out_specs=anywhere,
            scratch_shapes=[
                pltpu.VMEM((2, heads, queries, dim), q.dtype),
                pltpu.VMEM((heads, queries, dim), q.dtype),
                pltpu.VMEM(
                    (2, shape.pages, 2, heads, shape.page_size, dim),
                    kv.pages.dtype,
                ),
                stats,
                stats,
                pltpu.VMEM((heads, queries, dim), jnp.float32),
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
        kv.pages,
    )


def _kernel(
    shape: _Shape,
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
    pool_ref: Any,  # HBM [N, 2, Hkv, P, D]
    out_ref: Any,  # HBM as q
    # Scratch.
    q_buf: Any,  # VMEM [2, Hkv, Q, D]
    out_buf: Any,  # VMEM [Hkv, Q, D]
    kv_buf: Any,  # VMEM [2, pages, 2, Hkv, P, D]
    peak_ref: Any,  # VMEM [Hkv, Q, LANES], every lane alike
    total_ref: Any,  # VMEM [Hkv, Q, LANES], every lane alike
    acc_ref: Any,  # VMEM [Hkv, Q, D]
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
            do(pltpu.make_async_copy(pool_ref.at[page], kv_buf.at[slot, i], kv_sems.at[slot]))

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
            _zero_tail(shape, kv_buf, slot, kv_len - index * block)
            inside = (index + 1) * block <= position + 1
            if shape.params.sliding_window is not None:
                inside &= index * block > position + shape.tile - 1 - shape.params.sliding_window

            compute = functools.partial(
                _add_block,
                shape,
                q_buf.at[q_slot],
                kv_buf.at[slot],
                peak_ref,
                total_ref,
                acc_ref,
                index * block,
                position,
                kv_len,
            )
            if shape.tile == 1 and shape.params.sliding_window is None:
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

        _each_head(shape, one_head)
        out_copy(item).start()
        return slot

    lax.fori_loop(0, num_items, one_item, jnp.int32(0))

    @pl.when(num_items > 0)
    def _last() -> None:
        out_copy(num_items - 1).wait()


def _zero_tail(shape: _Shape, kv_buf: Any, slot: Any, num_left: Any) -> None:
    """Zeroes values beyond the row's end: what was never written may be NaN, and 0 · NaN is NaN."""

    @pl.when(num_left < shape.block)
    def _tail() -> None:
        values = kv_buf.at[slot]
        dims = (shape.num_kv_heads, shape.page_size, shape.head_dim)

        def one_page(i: Any, _: None) -> None:
            place = i * shape.page_size + lax.broadcasted_iota(jnp.int32, dims, 1)
            old = values[i, 1]
            kept = jnp.where(place < num_left, old.astype(jnp.float32), 0.0)
            values[i, 1] = kept.astype(old.dtype)

        lax.fori_loop(lax.div(num_left, shape.page_size), shape.pages, one_page, None)


def _add_block(
    shape: _Shape,
    q_ref: Any,  # [Hkv, Q, D]
    kv_ref: Any,  # [pages, 2, Hkv, P, D]
    peak_ref: Any,
    total_ref: Any,
    acc_ref: Any,
    first_key: Any,
    position: Any,
    kv_len: Any,
    *,
    masked: bool,
) -> None:
    """Takes one KV block into every head's online softmax."""
    params, block, queries = shape.params, shape.block, shape.queries
    precision = lax.Precision.HIGHEST if q_ref.dtype == jnp.float32 else None
    visible = None
    if masked:
        key = first_key + lax.broadcasted_iota(jnp.int32, (queries, block), 1)
        query = lax.broadcasted_iota(jnp.int32, (queries, block), 0)
        query = position + lax.div(query, jnp.full_like(query, shape.group))
        visible = key <= jnp.minimum(query, kv_len - 1)
        if params.sliding_window is not None:
            visible &= key > query - params.sliding_window

    def one_head(head: Any) -> None:
        keys = kv_ref[:, 0, head].reshape(block, shape.head_dim)
        values = kv_ref[:, 1, head].reshape(block, shape.head_dim)
        scores = lax.dot_general(
            q_ref[head],
            keys.astype(q_ref.dtype),
            (((1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        scores = scores * params.scale
        if params.logit_softcap is not None:
            scores = params.logit_softcap * jnp.tanh(scores * (1 / params.logit_softcap))
        if visible is not None:
            scores = jnp.where(visible, scores, _MASKED)
        old_peak = peak_ref[head][:, :1]
        peak = jnp.maximum(old_peak, scores.max(axis=1, keepdims=True))
        weight = jnp.exp(scores - peak)
        if visible is not None:
            # A query of a windowed tile may see nothing of this block and nothing before it.
            weight = jnp.where(visible, weight, 0.0)
        shrink = jnp.exp(old_peak - peak)
        total = total_ref[head][:, :1] * shrink + weight.sum(axis=1, keepdims=True)
        peak_ref[head] = jnp.broadcast_to(peak, (queries, LANES))
        total_ref[head] = jnp.broadcast_to(total, (queries, LANES))
        acc_ref[head] = acc_ref[head] * shrink + lax.dot_general(
            weight.astype(q_ref.dtype),
            values.astype(q_ref.dtype),
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )

    _each_head(shape, one_head)


def _each_head(shape: _Shape, do: Callable[[Any], None]) -> None:
    """Decode's small products are unrolled, so that heads overlap; prefill's fill the unit."""
    if shape.tile == 1 and shape.unrolled:
        for head in range(shape.num_kv_heads):
            do(head)
    else:
        lax.fori_loop(0, shape.num_kv_heads, lambda head, _: do(head), None)
