"""Ragged paged attention in plain XLA: the CPU's path, and the fallback anywhere.

On a CPU one native function computes most decode rows (`cpu/native_attention`), and this all
others. Both halves walk KV in blocks of pages with an online softmax (Source: Milakov and
Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135), as far as a row is long: whole blocks,
then a `tail` of it.

- decode rows go in groups of `row_group`: one gather of contiguous pages and one batched matrix
  product serve the whole group, which divides the loop's fixed cost. The packer sorts decode rows
  by length, so that a group's longest row is little longer than its shortest. Products take the
  gathered pages as they stand, scores lie row by row in between: XLA vectorizes along the last
  dimension, and one of a page's 8 keys makes an exponential ten times as long as one of 128. Where
  such small products are slow (Eigen's), scores are multiplied and summed in a loop (`score_sums`);
- prefill rows go in tiles of `query_tile` queries. Tiles run in token order, so the garbage after
  a row's last query is overwritten by the next row's first tile.

Data movement: a page is read once a group (decode) or once a tile (prefill), through a gathered
copy that stays in the core's L2: whole pages for prefill; a page's keys, then values, to decode.
Where values are the beginnings of keys, a page is copied once for both, and weighed whole: of sums
of whole keys only the beginnings are kept, which costs less than another copy of the beginnings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels.cpu import native_attention
from octavo.pallas_kernels.ragged_paged_attention.batch import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
)
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import to_float32
from octavo.pallas_kernels.ragged_paged_attention.tiles_xla import XlaTiles, choose_xla_tiles

_MASKED = -1e30
MERGED_HEADS = 16
"""Up to so many query heads, all of a row meet the keys of all its KV heads in one product, and the
scores of others' keys are thrown away: a product of 3 heads takes as long as one of 9."""


def attend_xla(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    *,
    sinks: jax.Array | None = None,
    decode_only: bool = False,
    quick: bool = False,
    tiles: XlaTiles | None = None,
) -> jax.Array:
    """Attention of packed queries over their rows' pages.

    Args:
        q: [T, Hq, D] packed queries.
        kv: pool [N, 2, Hkv, P, D], or [N, 1, Hkv, P, D] of keys alone, the step's own KV already
            written.
        batch: see `RaggedBatch`.
        params: see `AttentionParams`.
        sinks: float32[Hq] a logit each head adds to the softmax's denominator; None is none.
        decode_only: every row has one token (T = S): leaves the prefill half out.
        quick: decode rows are not computed by a native function, which compiles longer.
        tiles: block sizes; None takes the measured or computed ones of the shape.

    Returns:
        [T, Hq, D] in q's dtype; padding tokens hold garbage, as what exceeds the values of keys
        alone does.
    """
    if tiles is None:
        tiles = choose_xla_tiles(q.shape, q.dtype, kv.pages.shape, kv.pages.dtype)
    if not quick and tiles.native_decode and native_attention.takes(q.shape[2], kv):
        out = native_attention.decode_rows(q, kv, batch, params, sinks)
    else:
        out = _decode(q, kv, batch, params, sinks, tiles)
    if decode_only:
        return out
    return _prefill(q, kv, batch, params, sinks, tiles, out)


class _Softmax(NamedTuple):
    """Running maximum, denominator and numerator of an online softmax."""

    peak: jax.Array  # [..., 1]
    total: jax.Array  # [..., 1]
    acc: jax.Array  # [..., D]

    @classmethod
    def start(cls, *shape: int) -> _Softmax:
        return cls(
            jnp.full((*shape[:-1], 1), _MASKED, jnp.float32),
            jnp.zeros((*shape[:-1], 1), jnp.float32),
            jnp.zeros(shape, jnp.float32),
        )

    def add(
        self,
        scores: jax.Array,
        visible: jax.Array,
        weigh: Callable[[jax.Array], jax.Array],
    ) -> _Softmax:
        """Takes in one block.

        Args:
            scores, visible: [..., K], of its keys.
            weigh: sums its values by weights [..., K] to [..., D].
        """
        scores = jnp.where(visible, scores, _MASKED)
        peak = jnp.maximum(self.peak, scores.max(-1, keepdims=True))
        # While a row has seen nothing, its peak is the mask itself and every weight 1: the first
        # real peak shrinks all of that to zero.
        weight = jnp.exp(scores - peak)
        shrink = jnp.exp(self.peak - peak)
        return _Softmax(
            peak,
            self.total * shrink + weight.sum(-1, keepdims=True),
            self.acc * shrink + weigh(weight),
        )

    def result(self, sinks: jax.Array | None = None) -> jax.Array:
        """Numerator over denominator; `sinks` [..., 1] are logits of keys without a value."""
        if sinks is None:
            return self.acc / jnp.maximum(self.total, 1e-30)
        peak = jnp.maximum(self.peak, sinks)
        shrink = jnp.exp(self.peak - peak)
        return self.acc * shrink / (self.total * shrink + jnp.exp(sinks - peak))


def _decode(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    sinks: jax.Array | None,
    tiles: XlaTiles,
) -> jax.Array:
    num_tokens, num_heads, head_dim = q.shape
    num_rows = min(batch.kv_lens.shape[0], num_tokens)
    pages, tail = _blocks(kv, batch, tiles.decode_block, tiles.tail)
    rows = min(tiles.row_group, num_rows)
    num_kv_heads = kv.num_kv_heads
    group = num_heads // num_kv_heads
    sink_rows = None if sinks is None else sinks.reshape(1, num_kv_heads, group, 1)

    def one_group(index: jax.Array, out: jax.Array) -> jax.Array:
        # The last group starts early when rows do not divide: rows done twice get the same result.
        first = jnp.minimum(index * rows, num_rows - rows)
        queries = lax.dynamic_slice(q, (first, 0, 0), (rows, num_heads, head_dim))
        queries = (queries.astype(jnp.float32) * params.scale).reshape(
            rows, num_kv_heads, group, head_dim
        )
        score = _summed_scores(queries) if tiles.score_sums else _scores_of(queries, {pages, tail})
        table = lax.dynamic_slice(batch.block_table, (first, 0), (rows, batch.block_table.shape[1]))
        lens = lax.dynamic_slice(batch.kv_lens, (first,), (rows,))
        # Prefill rows may share the last group: they are computed again, rightly, below.
        is_decode = first + jnp.arange(rows, dtype=jnp.int32) < batch.num_decode_rows
        lens = jnp.where(is_decode, lens, 0)

        def one_block(page: jax.Array, count: int, softmax: _Softmax) -> _Softmax:
            ids = lax.dynamic_slice(table, (0, page), (rows, count))
            keys, values = _gather_apart(kv, ids)
            scores = score(keys).reshape(rows, num_kv_heads, group, -1)
            visible = _visible(lens[:, None] - 1, _positions(kv, page, count)[None, :], params)

            def weigh(weight: jax.Array) -> jax.Array:
                if num_kv_heads == 1:  # keys of all pages follow each other
                    flat = values.reshape(rows, 1, -1, head_dim)
                    return jnp.einsum("rhgk,rhkd->rhgd", weight, flat)
                weight = weight.reshape(rows, num_kv_heads, group, count, kv.page_size)
                weight = lax.optimization_barrier(weight.transpose(0, 3, 1, 2, 4))
                return jnp.einsum("rnhgp,rnhpd->rnhgd", weight, values).sum(1)

            return softmax.add(_soft_cap(scores, params), visible[:, None, None], weigh)

        first_key = _first_visible(jnp.where(lens > 0, lens, lens.max()), params).min()
        softmax = _Softmax.start(rows, num_kv_heads, group, head_dim)
        softmax = _walk(kv, first_key, lens.max(), (pages, tail), one_block, softmax)
        return lax.dynamic_update_slice(
            out,
            softmax.result(sink_rows).reshape(rows, num_heads, head_dim).astype(q.dtype),
            (first, 0, 0),
        )

    num_groups = lax.div(batch.num_decode_rows + rows - 1, rows)
    return lax.fori_loop(0, num_groups, one_group, jnp.zeros_like(q))


def _prefill(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    sinks: jax.Array | None,
    tiles: XlaTiles,
    out: jax.Array,
) -> jax.Array:
    num_tokens, num_heads, head_dim = q.shape
    tile = min(tiles.query_tile, num_tokens)
    pages, tail = _blocks(kv, batch, tiles.prefill_block, tiles.tail)
    num_kv_heads = kv.num_kv_heads
    group = num_heads // num_kv_heads
    sink_rows = None
    if sinks is not None:  # queries of a tile lie head by head
        sink_rows = jnp.repeat(sinks.reshape(1, num_kv_heads, group), tile, axis=2)[..., None]

    def one_row(row: jax.Array, out: jax.Array) -> jax.Array:
        first = batch.cu_q_lens[row]
        q_len = batch.cu_q_lens[row + 1] - first
        kv_len = batch.kv_lens[row]
        table = lax.dynamic_index_in_dim(batch.block_table, row, keepdims=True)

        def one_tile(j: jax.Array, out: jax.Array) -> jax.Array:
            # A tile that would run past the last token begins earlier, and keeps what is there.
            token = jnp.minimum(first + j * tile, num_tokens - tile)
            num_kept = first + j * tile - token
            queries = lax.dynamic_slice(q, (token, 0, 0), (tile, num_heads, head_dim))
            queries = (queries.astype(jnp.float32) * params.scale).reshape(
                tile, num_kv_heads, group, head_dim
            )
            queries = queries.transpose(1, 2, 0, 3).reshape(1, num_kv_heads, group * tile, head_dim)
            index = jnp.arange(tile, dtype=jnp.int32)
            first_position = kv_len - q_len + j * tile
            position = jnp.minimum(first_position - num_kept + index, kv_len - 1)

            def one_block(page: jax.Array, count: int, softmax: _Softmax) -> _Softmax:
                ids = lax.dynamic_slice(table, (0, page), (1, count))
                keys, values = _gather(kv, ids)
                scores = _soft_cap(jnp.einsum("rhqd,rhkd->rhqk", queries, keys), params)
                key_position = _positions(kv, page, count)
                visible = _visible(position[:, None], key_position[None, :], params)
                visible = jnp.broadcast_to(visible[None], (group, *visible.shape))
                return softmax.add(
                    scores,
                    visible.reshape(1, 1, group * tile, -1),
                    lambda weight: jnp.einsum("rhqk,rhkd->rhqd", weight, values),
                )

            first_key = _first_visible(first_position + 1, params)
            softmax = _Softmax.start(1, num_kv_heads, group * tile, head_dim)
            softmax = _walk(kv, first_key, position[-1] + 1, (pages, tail), one_block, softmax)
            result = softmax.result(sink_rows).reshape(num_kv_heads, group, tile, head_dim)
            result = result.transpose(2, 0, 1, 3).reshape(tile, num_heads, head_dim)
            kept = lax.dynamic_slice(out, (token, 0, 0), (tile, num_heads, head_dim))
            result = jnp.where((index >= num_kept)[:, None, None], result.astype(q.dtype), kept)
            return lax.dynamic_update_slice(out, result, (token, 0, 0))

        return lax.fori_loop(0, lax.div(q_len + tile - 1, tile), one_tile, out)

    return lax.fori_loop(batch.num_decode_rows, batch.num_rows, one_row, out)


def _blocks(kv: PagedKV, batch: RaggedBatch, tokens: int, least: int) -> tuple[int, int]:
    """Pages in a block: the most within `tokens` that divide the block table; and in one of what
    whole blocks leave over, which divides a block and has `least` tokens if a block has."""
    page_size, table = kv.page_size, batch.block_table.shape[1]
    pages = max(1, min(tokens // page_size, table))
    while table % pages:
        pages -= 1
    tail = pages
    while tail % 2 == 0 and tail * page_size >= 2 * least:
        tail //= 2
    return pages, tail


def _walk(
    kv: PagedKV,
    first_key: jax.Array,
    num_keys: jax.Array,
    blocks: tuple[int, int],
    one_block: Callable[[jax.Array, int, _Softmax], _Softmax],
    softmax: _Softmax,
) -> _Softmax:
    """Takes in keys from `first_key` up to `num_keys`, block by block.

    Args:
        blocks: pages of a whole block, and of one of what whole blocks leave over.
        one_block: given its first page and how many it has.
    """
    pages, tail = blocks
    start = lax.div(first_key, tail * kv.page_size)
    stop = lax.div(num_keys + tail * kv.page_size - 1, tail * kv.page_size)
    ratio = pages // tail
    if ratio > 1:
        num_whole = lax.div(jnp.maximum(stop - start, 0), ratio)
        begun = start * tail
        softmax = lax.fori_loop(
            0, num_whole, lambda i, seen: one_block(begun + i * pages, pages, seen), softmax
        )
        start += num_whole * ratio
    return lax.fori_loop(start, stop, lambda i, seen: one_block(i * tail, tail, seen), softmax)


def _positions(kv: PagedKV, page: jax.Array, count: int) -> jax.Array:
    """Positions of the keys of `count` pages from page `page` of a row's table on."""
    return page * kv.page_size + jnp.arange(count * kv.page_size, dtype=jnp.int32)


def _gather(kv: PagedKV, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [R, Hkv, pages·P, D] in float32 of page ids [R, pages]."""
    rows, pages = ids.shape
    pool, scales = _copies(kv, ids.reshape(-1), 1)
    block = _wide(kv, pool, scales).reshape(rows, pages, *kv.pages.shape[1:])
    block = block.transpose(2, 0, 3, 1, 4, 5)  # [2, R, Hkv, pages, P, D]
    block = block.reshape(-1, rows, kv.num_kv_heads, pages * kv.page_size, kv.head_dim)
    return block[0], block[-1]


def _gather_apart(kv: PagedKV, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [R, N, Hkv, P, D] in float32 of page ids [R, N]."""
    shape = (*ids.shape, *kv.pages.shape[2:])

    halves = kv.pages.shape[1]

    def half(which: int) -> jax.Array:
        pages, scales = _copies(kv, halves * ids.reshape(-1) + which, halves)
        numbers = _wide(kv, pages, scales)
        # Fused into a product, widening eight bits takes several times as long.
        return (numbers if scales is None else lax.optimization_barrier(numbers)).reshape(shape)

    keys = half(0)
    return keys, keys if halves == 1 else half(1)


def _scores_of(queries: jax.Array, counts: set[int]) -> Callable[[jax.Array], jax.Array]:
    """What scores keys [R, N, Hkv, P, D] by queries [R, Hkv, G, D] to [R, Hkv, G, N, P].

    Args:
        counts: the numbers N that keys may have; what a group needs for each is made once.
    """
    rows, heads, group, dim = queries.shape
    if heads * group <= MERGED_HEADS or heads == 1:
        merged = lax.optimization_barrier(queries.reshape(rows, heads * group, dim))

        def score(keys: jax.Array) -> jax.Array:
            count, page_size = keys.shape[1], keys.shape[3]
            flat = keys.reshape(rows, count * heads * page_size, dim)
            scores = lax.optimization_barrier(jnp.einsum("rqd,rkd->rqk", merged, flat))
            scores = scores.reshape(rows, heads, group, count, heads, page_size)
            return jnp.stack([scores[:, h, :, :, h] for h in range(heads)], 1)

        return score
    # Each page of a block meets a copy of its row's queries.
    copies = {
        count: lax.optimization_barrier(
            jnp.broadcast_to(queries[:, None], (rows, count, heads, group, dim))
        )
        for count in counts
    }

    def score_pages(keys: jax.Array) -> jax.Array:
        scores = jnp.einsum("rnhgd,rnhpd->rnhgp", copies[keys.shape[1]], keys)
        return lax.optimization_barrier(scores).transpose(0, 2, 3, 1, 4)

    return score_pages


def _summed_scores(queries: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """As `_scores_of`, without a product: each number of a key by its query's, and summed."""
    rows, heads, group, dim = queries.shape
    wide = queries.reshape(rows, 1, heads, group, 1, dim)

    def score(keys: jax.Array) -> jax.Array:
        scores = (keys[:, :, :, None] * wide).sum(-1)  # [R, N, Hkv, G, P]
        return lax.optimization_barrier(scores).transpose(0, 2, 3, 1, 4)

    return score


def _copies(kv: PagedKV, ids: jax.Array, parts: int) -> tuple[jax.Array, jax.Array | None]:
    """Pages (parts = 1) or halves of pages (2) as [ids, numbers of one head, D], and scales."""

    def copy(pool: jax.Array) -> jax.Array:
        rows = pool.reshape(pool.shape[0] * parts, -1).at[ids].get(mode="promise_in_bounds")
        # Fused into what follows, the copies would become loops over elements.
        return lax.optimization_barrier(rows)

    pages = copy(kv.pages).reshape(len(ids), -1, kv.head_dim)
    return pages, None if kv.scales is None else copy(kv.scales)


def _wide(kv: PagedKV, pages: jax.Array, scales: jax.Array | None) -> jax.Array:
    """The numbers that copies of pages stand for, in float32."""
    numbers = to_float32(pages)
    if scales is None:
        return numbers
    if kv.value_size is None:
        return numbers * scales[..., None]
    of_values, of_rest = jnp.split(scales, 2, axis=1)  # [ids, tokens] each
    is_value = jnp.arange(kv.head_dim) < kv.value_size
    return numbers * jnp.where(is_value, of_values[..., None], of_rest[..., None])


def _soft_cap(scores: jax.Array, params: AttentionParams) -> jax.Array:
    if params.logit_softcap is None:
        return scores
    return params.logit_softcap * jnp.tanh(scores / params.logit_softcap)


def _visible(position: jax.Array, key_position: jax.Array, params: AttentionParams) -> jax.Array:
    visible = key_position <= position
    return (
        visible if params.sees_all else visible & (key_position >= params.first_visible(position))
    )


def _first_visible(kv_len: jax.Array, params: AttentionParams) -> jax.Array:
    """First key position that the query at `kv_len - 1` sees."""
    return params.first_visible(jnp.maximum(kv_len - 1, 0))
