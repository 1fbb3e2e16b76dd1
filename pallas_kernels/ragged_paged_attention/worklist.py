"""The schedule of a ragged step, computed from lengths on the device: a list of query tiles.

Kernels walk a worklist instead of a grid of rows × tiles: its padded length is static, its true
length is data, and a long prompt is many items that any core may take.

Legend: T tokens, S rows, I items (static bound), A packed query tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels.ragged_paged_attention.batch import AttentionParams, RaggedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Worklist:
    """Query tiles; items at and beyond `num_items` hold zeros.

    Attributes:
        num_items: int32[1].
        row: int32[I] whose queries.
        start: int32[I] first query's place among the packed queries, in tokens.
        position: int32[I] its position in its sequence.
        num_queries: int32[I] queries of the tile that exist.
    """

    num_items: jax.Array
    row: jax.Array
    start: jax.Array
    position: jax.Array
    num_queries: jax.Array


def decode_worklist(batch: RaggedBatch) -> Worklist:
    """One item a decode row that is not idle; `start` is the row's token.

    Args:
        batch: decode rows first; I = S.
    """
    num_rows = batch.kv_lens.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    item = decode_items(batch)
    rows = jnp.zeros_like(row).at[jnp.where(item < 0, num_rows, item)].set(row, mode="drop")
    num_items = (item >= 0).sum(dtype=jnp.int32)
    live = row < num_items
    return Worklist(
        num_items=num_items[None],
        row=rows,
        start=jnp.where(live, batch.cu_q_lens[rows], 0),
        position=jnp.where(live, batch.kv_lens[rows] - 1, 0),
        num_queries=live.astype(jnp.int32),
    )


def decode_items(batch: RaggedBatch) -> jax.Array:
    """int32[S] each row's item of `decode_worklist`; -1 of idle rows and of those that prefill."""
    row = jnp.arange(batch.kv_lens.shape[0], dtype=jnp.int32)
    active = (row < batch.num_decode_rows) & (batch.kv_lens > 0)
    return jnp.where(active, jnp.cumsum(active, dtype=jnp.int32) - 1, -1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPacking:
    """Where prefill queries go so that every row starts on an aligned place.

    Attributes:
        token: int32[A] the token at each packed place; 0 in gaps.
        place: int32[T] each token's packed place; 0 for tokens of decode rows and padding.
        row_start: int32[S] each row's first packed place.
        item: int32[T] the item of `prefill_worklist` that each token is of; 0 as `place`.
        within: int32[T] its place in that item's tile; 0 as `place`.
    """

    token: jax.Array
    place: jax.Array
    row_start: jax.Array
    item: jax.Array
    within: jax.Array


def num_packed_tokens(num_tokens: int, num_rows: int, tile: int, align: int) -> int:
    """A: tokens, a gap a row, and a tile that may run past the last row."""
    gaps = min(num_rows, num_tokens) * (align - 1)
    return -(-(num_tokens + gaps) // align) * align + tile


def pack_prefill(batch: RaggedBatch, num_tokens: int, *, tile: int, align: int) -> PrefillPacking:
    """Packs the queries of prefill rows, each row from a multiple of `align` on.

    Args:
        batch: rows at and beyond `num_decode_rows` are prefill.
        num_tokens: T.
        tile: queries a kernel reads at once, a multiple of `align`.
        align: tokens.
    """
    num_rows = batch.kv_lens.shape[0]
    lens = _prefill_lens(batch)
    padded = (lens + align - 1) // align * align
    row_start = jnp.cumsum(padded, dtype=jnp.int32) - padded
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    row = batch.token_row
    live = (token < batch.cu_q_lens[batch.num_rows]) & (lens[row] > 0)
    place = jnp.where(live, row_start[row] + token - batch.cu_q_lens[row], 0)
    packed = num_packed_tokens(num_tokens, num_rows, tile, align)
    # Distinct where live; the rest is sent beyond the end and dropped.
    inverse = jnp.zeros((packed,), jnp.int32)
    inverse = inverse.at[jnp.where(live, place, packed)].set(token, mode="drop")
    tiles = (lens + tile - 1) // tile
    row_item = jnp.cumsum(tiles, dtype=jnp.int32) - tiles
    since = place - row_start[row]
    return PrefillPacking(
        token=inverse,
        place=place,
        row_start=row_start,
        item=jnp.where(live, row_item[row] + since // tile, 0),
        within=jnp.where(live, since % tile, 0),
    )


def num_prefill_items(num_tokens: int, num_rows: int, tile: int) -> int:
    """I: whole tiles of all tokens, and a part of one a row."""
    return num_tokens // tile + min(num_rows, num_tokens)


def prefill_worklist(
    batch: RaggedBatch, packing: PrefillPacking, num_tokens: int, *, tile: int
) -> Worklist:
    """Tiles of `tile` queries of every prefill row that is not idle, in packed order."""
    num_rows = batch.kv_lens.shape[0]
    lens = _prefill_lens(batch)
    tiles = (lens + tile - 1) // tile
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    item = jnp.arange(num_prefill_items(num_tokens, num_rows, tile), dtype=jnp.int32)
    live = item < ends[-1]
    row = jnp.where(live, jnp.searchsorted(ends, item, side="right", method="compare_all"), 0)
    row = row.astype(jnp.int32)
    first = (item - (ends[row] - tiles[row])) * tile
    return Worklist(
        num_items=ends[-1:],
        row=row,
        start=jnp.where(live, packing.row_start[row] + first, 0),
        position=jnp.where(live, batch.kv_lens[row] - lens[row] + first, 0),
        num_queries=jnp.where(live, jnp.minimum(tile, lens[row] - first), 0),
    )


def block_range(
    work: Worklist, kv_lens: jax.Array, params: AttentionParams, block: int
) -> tuple[jax.Array, jax.Array]:
    """KV blocks [first, end) that each item's queries see, int32[I] both; at least one each.

    Args:
        block: tokens in a KV block.
    """
    last = jnp.minimum(work.position + jnp.maximum(work.num_queries, 1), kv_lens[work.row])
    end = jnp.maximum(lax.div(last + block - 1, block), 1)
    if params.sees_all:
        return jnp.zeros_like(end), end
    first = lax.div(params.first_visible(work.position), block)
    return jnp.minimum(first, end - 1), end


def _prefill_lens(batch: RaggedBatch) -> jax.Array:
    """int32[S] new tokens of each prefill row; 0 for decode, idle and padding rows."""
    row = jnp.arange(batch.kv_lens.shape[0], dtype=jnp.int32)
    lens = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    prefill = (row >= batch.num_decode_rows) & (row < batch.num_rows) & (batch.kv_lens > 0)
    return jnp.where(prefill, lens, 0)
