"""Writes a step's new keys and values into their pages on a TPU, in place.

A TPU stores whole tiles of sublanes, so a token's KV is merged into the tile [2, Hkv, W, D] of its
page that holds it: the tile is read, some of its W places replaced, and written back. W is one
sublane tile of the pool's dtype: 8 numbers of 4 bytes, 16 of 2, 32 of 1. Pallas pipelines the tiles
by block index; the pool is aliased from input to output, so nothing else of it moves.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from octavo.pallas_kernels.ragged_paged_attention.batch import PagedKV, RaggedBatch


def sublane_tile(dtype: Any) -> int:
    """Places in a sublane tile of a dtype."""
    return 8 * 4 // jnp.dtype(dtype).itemsize


def write_kv_mosaic_tpu(
    kv: PagedKV,
    k: jax.Array,
    v: jax.Array,
    batch: RaggedBatch,
    *,
    decode_only: bool = False,
    interpret: Any = False,
) -> PagedKV:
    """Merges the new KV of each token into its page.

    Args:
        kv: pool [N, 2, Hkv, P, D]; updated in place under donation. P is a multiple of W.
        k, v: [T, Hkv, D] new keys and values.
        batch: `block_table` and the lengths say where each goes; idle rows go nowhere.
        decode_only: every row has one token: a tile a token, with no gather beforehand.
        interpret: run in Pallas' interpreter.

    Returns:
        The updated pool. Page 0 holds garbage.
    """
    new = jnp.stack([k, v], axis=1).astype(kv.pages.dtype)  # [T, 2, Hkv, D]
    width = sublane_tile(kv.pages.dtype)
    if decode_only:
        place = lax.div(batch.token_offset, width)
        low = lax.rem(batch.token_offset, width)
        flat = new.reshape(new.shape[0], -1, kv.head_dim)
        pages = _call(_merge_token, kv, batch.token_page, place, low, low + 1, flat, interpret)
        return PagedKV(pages=pages)
    page, place, low, high, token = _tiles(kv, batch, k.shape[0], width)
    tiles = new[token].transpose(0, 2, 3, 1, 4)  # [I, 2, Hkv, W, D]
    return PagedKV(pages=_call(_merge_tile, kv, page, place, low, high, tiles, interpret))


def _tiles(
    kv: PagedKV, batch: RaggedBatch, num_tokens: int, width: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Every tile that new tokens fall into.

    Returns:
        int32[I] page, place in the page in tiles, and first and end place written in the tile;
        int32[I, W] the token of each place.
    """
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
    page = jnp.where(used, batch.block_table[of, column], 0)
    place = jnp.where(used, lax.rem(tile, kv.page_size // width), 0)
    low = jnp.where(used, jnp.maximum(first[of] - tile * width, 0), 0)
    high = jnp.where(used, jnp.minimum(first[of] + lens[of] - tile * width, width), 0)
    position = tile[:, None] * width + jnp.arange(width, dtype=jnp.int32)
    token = batch.cu_q_lens[of][:, None] + position - first[of][:, None]
    return page, place, low, high, jnp.clip(token, 0, num_tokens - 1)


def _call(
    kernel: Any,
    kv: PagedKV,
    page: jax.Array,
    place: jax.Array,
    low: jax.Array,
    high: jax.Array,
    new: jax.Array,
    interpret: Any,
) -> jax.Array:
    width = sublane_tile(kv.pages.dtype)
    tile = (1, 2, kv.num_kv_heads, width, kv.head_dim)
    num_items = page.shape[0]
    tile_bytes = 2 * kv.num_kv_heads * width * kv.head_dim * kv.pages.dtype.itemsize

    def of_pool(i: Any, page: Any, place: Any, *_: Any) -> tuple[Any, ...]:
        return (page[i], 0, 0, place[i], 0)

    call = pl.pallas_call(
        functools.partial(kernel, width),
        out_shape=jax.ShapeDtypeStruct(kv.pages.shape, kv.pages.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_items,),
            in_specs=[
                pl.BlockSpec((1, *new.shape[1:]), lambda i, *_: (i,) + (0,) * (new.ndim - 1)),
                pl.BlockSpec(tile, of_pool),
            ],
            out_specs=pl.BlockSpec(tile, of_pool),
        ),
        input_output_aliases={5: 0},
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=num_items * 2 * tile_bytes + new.size * new.dtype.itemsize,
        ),
        name="kv_write",
        interpret=interpret,
    )
    return call(page, place, low, high, new, kv.pages)


def _merge_token(
    width: int, page: Any, place: Any, low: Any, high: Any, new: Any, old: Any, out: Any
) -> None:
    """new [1, 2 · Hkv, D]: one token, broadcast over the tile's places."""
    del page, place, high
    _, two, heads, _, dim = out.shape
    here = lax.broadcasted_iota(jnp.int32, (width, dim), 0) == low[pl.program_id(0)]
    for i in range(two * heads):
        half, head = divmod(i, heads)
        token = jnp.broadcast_to(new[0, i : i + 1].astype(jnp.float32), (width, dim))
        kept = old[0, half, head].astype(jnp.float32)
        out[0, half, head] = jnp.where(here, token, kept).astype(out.dtype)


def _merge_tile(
    width: int, page: Any, place: Any, low: Any, high: Any, new: Any, old: Any, out: Any
) -> None:
    """new [1, 2, Hkv, W, D]: places [low, high) are new."""
    del page, place
    item = pl.program_id(0)
    _, two, heads, _, dim = out.shape
    at = lax.broadcasted_iota(jnp.int32, (two, heads, width, dim), 2)
    here = (at >= low[item]) & (at < high[item])
    kept = old[0].astype(jnp.float32)
    out[0] = jnp.where(here, new[0].astype(jnp.float32), kept).astype(out.dtype)
