"""Writes a step's new keys and values into their pages on a TPU, in place.

A TPU stores whole tiles of sublanes, so a token's KV is merged into the tile [2, Hkv, W, D] of its
page that holds it, or [1, Hkv, W, D'] where its key and value share a row or it has a key alone:
the tile is read, some of its W places replaced, and written back. W is one sublane tile of the
pool's dtype: 8 numbers of 4 bytes, 16 of 2, 32 of 1, or a page of 16 where that is less. Pallas
pipelines the tiles by block index; the pool is aliased from input to output, so nothing else of it
moves.

Scales of a pool of int8 or fp8 lie along lanes, [2, Hkv, 128] for up to 128 places of a page: wider
than a tile of numbers. Tiles that share one follow each other, and each of them merges all of the
row's new scales that fall into it, so that it does not matter which of them is written last.
New numbers are rounded by XLA, in the same way as for every other implementation.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo.pallas_kernels.ragged_paged_attention.batch import PagedKV, RaggedBatch
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import kv_quantization
from octavo.pallas_kernels.ragged_paged_attention.kv_write import round_kv
from octavo.pallas_kernels.ragged_paged_attention.tiles_tpu import LANES


def sublane_tile(dtype: Any) -> int:
    """Places in a sublane tile of a dtype."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def places_of_tile(kv: PagedKV) -> int:
    """W, places that are read and written together; a page may be a part of a sublane tile."""
    return min(sublane_tile(kv.pages.dtype), kv.page_size)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class _Tiles:
    """The tiles that new tokens fall into.

    Attributes:
        page: int32[I].
        place: int32[I] in the page, in tiles.
        low, high: int32[I] first and end place written in the tile.
        token: int32[I, W] of each place; None where an item is one token, the item's own.
        lane_place: int32[I] of the scales in the page, in tiles of 128 lanes.
        lane_low, lane_high: int32[I] first and end lane written.
        lane_token: int32[I, 128] of each lane; None as for `token`.
    """

    page: jax.Array
    place: jax.Array
    low: jax.Array
    high: jax.Array
    token: jax.Array | None
    lane_place: jax.Array
    lane_low: jax.Array
    lane_high: jax.Array
    lane_token: jax.Array | None


def write_kv_mosaic_tpu(
    kv: PagedKV,
    k: jax.Array,
    v: jax.Array | None,
    batch: RaggedBatch,
    *,
    decode_only: bool = False,
    interpret: Any = False,
) -> PagedKV:
    """Merges the new KV of each token into its page, rounded to the pool's dtype.

    Args:
        kv: pool [N, 2, Hkv, P, D] or [N, 1, Hkv, P, 2·D], and its scales [N, 2, Hkv, P'] if any;
            or [N, 1, Hkv, P, D] of keys alone, likewise. Updated in place under donation. P is a
            multiple of W, P' of 128.
        k, v: [T, Hkv, D] new keys and values; v is None for a pool of keys alone.
        batch: `block_table` and the lengths say where each goes; idle rows go nowhere.
        decode_only: every row has one token: a tile a token, with no gather beforehand.
        interpret: run in Pallas' interpreter.

    Returns:
        The updated pool. Page 0 holds garbage.
    """
    new = k[:, None] if v is None else jnp.stack([k, v], axis=1)  # [T, 2, Hkv, D]
    scale = None
    quantization = kv_quantization(kv.pages.dtype)
    if kv.scales is not None and quantization is not None:
        new, scale = round_kv(new, quantization, kv.value_size)  # and [T, 2, Hkv]
    if kv.in_one_row:
        new = jnp.concatenate([new[:, 0], new[:, 1]], axis=-1)[:, None]  # [T, 1, Hkv, 2·D]
    new = new.astype(kv.pages.dtype)
    width = places_of_tile(kv)
    if decode_only:
        tiles = _token_tiles(kv, batch, width)
        # Rows of a packed register cannot be told apart: bfloat16 holds narrower numbers exactly.
        flat = new.reshape(new.shape[0], -1, new.shape[3])
        flat = flat if flat.dtype.itemsize > 1 else flat.astype(jnp.bfloat16)
        new_scales = None
        if scale is not None:
            new_scales = jnp.broadcast_to(scale[..., None], (*scale.shape, LANES))
        return _call(_merge_token, kv, tiles, flat, new_scales, interpret)
    tiles = _row_tiles(kv, batch, k.shape[0], width)
    new_scales = None
    if scale is not None:
        new_scales = scale[tiles.lane_token].transpose(0, 2, 3, 1)  # [I, 2, Hkv, 128]
    stacked = new[tiles.token].transpose(0, 2, 3, 1, 4)  # [I, 2, Hkv, W, D]
    return _call(_merge_tile, kv, tiles, stacked, new_scales, interpret)


def _token_tiles(kv: PagedKV, batch: RaggedBatch, width: int) -> _Tiles:
    """A tile a token: an item is a token."""
    offset = batch.token_offset
    low, lane_low = lax.rem(offset, width), lax.rem(offset, min(LANES, kv.page_size))
    return _Tiles(
        page=batch.token_page,
        place=lax.div(offset, width),
        low=low,
        high=low + 1,
        token=None,
        lane_place=lax.div(offset, LANES),
        lane_low=lane_low,
        lane_high=lane_low + 1,
        lane_token=None,
    )


def _row_tiles(kv: PagedKV, batch: RaggedBatch, num_tokens: int, width: int) -> _Tiles:
    """Every tile that new tokens fall into, row after row and in order of position."""
    num_rows, table_pages = batch.block_table.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)
    live = (row < batch.num_rows) & (batch.kv_lens > 0)
    lens = jnp.where(live, batch.cu_q_lens[1:] - batch.cu_q_lens[:-1], 0)
    first = batch.kv_lens - lens  # position of the first new token
    count = jnp.where(lens > 0, lax.div(first + lens - 1, width) - lax.div(first, width) + 1, 0)
    ends = jnp.cumsum(count, dtype=jnp.int32)
    bound = min(num_tokens, num_tokens // width + 2 * min(num_rows, num_tokens))
    item = jnp.arange(bound, dtype=jnp.int32)
    used = item < ends[-1]
    of = jnp.where(used, jnp.searchsorted(ends, item, side="right", method="compare_all"), 0)
    of = of.astype(jnp.int32)
    tile = lax.div(first[of], width) + item - (ends[of] - count[of])
    column = jnp.clip(lax.div(tile * width, kv.page_size), 0, table_pages - 1)

    def span(begin: jax.Array, size: int, lanes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """First and end of the `size` places from position `begin` that are new; all's tokens."""
        low = jnp.where(used, jnp.maximum(first[of] - begin, 0), 0)
        high = jnp.where(used, jnp.minimum(first[of] + lens[of] - begin, size), 0)
        position = begin[:, None] + jnp.arange(lanes, dtype=jnp.int32)
        token = batch.cu_q_lens[of][:, None] + position - first[of][:, None]
        return low, high, jnp.clip(token, 0, num_tokens - 1)

    low, high, token = span(tile * width, width, width)
    lanes = min(LANES, kv.page_size)
    lane_low, lane_high, lane_token = span(lax.div(tile * width, lanes) * lanes, lanes, LANES)
    in_page = lax.rem(tile * width, kv.page_size)
    return _Tiles(
        page=jnp.where(used, batch.block_table[of, column], 0),
        place=jnp.where(used, lax.div(in_page, width), 0),
        low=low,
        high=high,
        token=token,
        lane_place=jnp.where(used, lax.div(in_page, LANES), 0),
        lane_low=lane_low,
        lane_high=lane_high,
        lane_token=lane_token,
    )


def _call(
    merge: Any,
    kv: PagedKV,
    tiles: _Tiles,
    new: jax.Array,
    new_scales: jax.Array | None,
    interpret: Any,
) -> PagedKV:
    width = places_of_tile(kv)
    _, halves, num_kv_heads, _, dim = kv.pages.shape
    tile = (1, halves, num_kv_heads, width, dim)
    num_items = tiles.page.shape[0]
    scalars = [tiles.page, tiles.place, tiles.low, tiles.high]
    moved_bytes = 2 * halves * num_kv_heads * width * dim * kv.pages.dtype.itemsize

    def of_item(array: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, *array.shape[1:]), lambda i, *_: (i,) + (0,) * (array.ndim - 1))

    def of_pool(i: Any, page: Any, place: Any, *_: Any) -> tuple[Any, ...]:
        return (page[i], 0, 0, place[i], 0)

    def of_scales(i: Any, page: Any, *rest: Any) -> tuple[Any, ...]:
        return (page[i], 0, 0, rest[3][i])

    pools, arrays = [pl.BlockSpec(tile, of_pool)], [new]
    aliased: list[jax.Array] = [kv.pages]
    if kv.scales is not None and new_scales is not None:
        scalars += [tiles.lane_place, tiles.lane_low, tiles.lane_high]
        pools.append(pl.BlockSpec((1, 2, kv.num_kv_heads, LANES), of_scales))
        arrays.append(new_scales)
        aliased.append(kv.scales)
        moved_bytes += 2 * 2 * kv.num_kv_heads * LANES * kv.scales.dtype.itemsize
    num_pools, num_scalars = len(pools), len(scalars)
    first_pool = num_scalars + num_pools
    call = pl.pallas_call(
        functools.partial(_kernel, merge, width, num_scalars, num_pools),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in aliased],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(num_items,),
            in_specs=[*(of_item(array) for array in arrays), *pools],
            out_specs=pools,
        ),
        input_output_aliases={first_pool + i: i for i in range(num_pools)},
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=num_items * moved_bytes + sum(array.nbytes for array in arrays),
        ),
        name="kv_write",
        interpret=interpret,
    )
    pages, *scales = call(*scalars, *arrays, *aliased)
    return replace(kv, pages=pages, scales=scales[0] if scales else None)


def _kernel(merge: Any, width: int, num_scalars: int, num_pools: int, *refs: Any) -> None:
    scalars, rest = refs[:num_scalars], refs[num_scalars:]
    new, old, out = (rest[i * num_pools : (i + 1) * num_pools] for i in range(3))
    item = pl.program_id(0)
    _, _, low, high, *lanes = (ref[item] for ref in scalars)
    merge(width, low, high, new[0], old[0], out[0])
    if num_pools > 1:
        _, lane_low, lane_high = lanes
        lane = lax.broadcasted_iota(jnp.int32, out[1].shape[1:], 2)
        here = (lane >= lane_low) & (lane < lane_high)
        out[1][0] = jnp.where(here, new[1][0], old[1][0])


def _merge_token(width: int, low: Any, high: Any, new: Any, old: Any, out: Any) -> None:
    """new [1, halves · Hkv, D]: one token, broadcast over the tile's places."""
    del high
    _, halves, heads, _, dim = out.shape
    here = lax.broadcasted_iota(jnp.int32, (width, dim), 0) == low
    for i in range(halves * heads):
        half, head = divmod(i, heads)
        token = jnp.broadcast_to(new[0, i : i + 1].astype(jnp.float32), (width, dim))
        kept = old[0, half, head].astype(jnp.float32)
        out[0, half, head] = jnp.where(here, token, kept).astype(out.dtype)


def _merge_tile(width: int, low: Any, high: Any, new: Any, old: Any, out: Any) -> None:
    """new [1, halves, Hkv, W, D]: places [low, high) are new."""
    del width
    at = lax.broadcasted_iota(jnp.int32, out.shape[1:], 2)
    here = (at >= low) & (at < high)
    kept = old[0].astype(jnp.float32)
    out[0] = jnp.where(here, new[0].astype(jnp.float32), kept).astype(out.dtype)
