"""Decode rows on a CPU: attention of all of them as one native function.

XLA's CPU backend compiles a call that says it is small, and is not to be inlined, into one
function, loops and all, so that no small operation is handed out one by one. It walks row by row
and, in a row, block by block with an online softmax (Source: as in `xla.py`):

- products of queries and keys in vectors of `_lanes`, without their sums: XLA would add up one
  number at a time, as the order of a sum is the program's. A product with a vector of ones, which
  XLA writes as vectors and shuffles, then sums all of a page's. A key's queries lie side by side,
  so that the key is read, and widened, once for its group;
- scores as one flat vector, masked as it is: where the same numbers are a vector here and heads by
  keys there, XLA takes them apart number by number;
- then the block's peak, its weights, and values `VALUES` keys at a time, which a core's registers
  hold. Each key's are a slice of their own: what one operation reads in several places is copied
  first, number by number, where what it reads once is not.

Such a function is compiled anew for each layer, 0.17 s where the path of products takes 0.04, so
programs that an engine waits for before it is ready ("quick" ones) do without.

Data movement: a key or value is read once, from the pool itself. Copying a block's pages side by
side first, as fast as memory gives them, takes as long or longer: the copies go to L2 and come back
from there. Touching the next block's pages between computing this one's takes longer than both one
after the other: a core has few loads on their way, and they hold up whatever comes after them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from octavo.pallas_kernels.ragged_paged_attention.backends import Backend
from octavo.pallas_kernels.ragged_paged_attention.batch import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
)
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import stored_dtype, to_float32
from octavo.pallas_kernels.tuning import CPU, tuning_device

COMPILER_OPTIONS = {"xla_cpu_prefer_vector_width": "512"}
"""On a CPU with AVX-512 it takes 0.8 of the time of XLA's own 256 bits; others ignore it."""
MOST_LANES = 32
MOST_KEYS = 16
"""Keys of a head that are computed at once: a page's, or those of a part of a longer page."""
VALUES = 4
"""Keys whose values are taken in at once."""
POOLS = tuple(stored_dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.int8))
"""What XLA makes float32 of in vectors: fp8 it takes number by number, and products read that
faster."""
_MASKED = -1e30


def compiler_options(backend: Backend, kv_dtype: Any) -> dict[str, str]:
    """Options of `jax.stages.Lowered.compile` for programs whose decode rows are computed here.

    Args:
        backend: of attention.
        kv_dtype: of the pool.

    Returns:
        None of them where nothing is.
    """
    is_here = backend == "xla" and tuning_device().startswith(CPU)
    return COMPILER_OPTIONS if is_here and jnp.dtype(kv_dtype) in POOLS else {}


def takes(q_dim: int, kv: PagedKV) -> bool:
    """Whether `decode_rows` computes heads of `q_dim` over this pool."""
    return (
        (kv.scales is None or kv.scales.shape[3] == kv.page_size)
        and not kv.in_one_row
        and q_dim == kv.head_dim
        and takes_pages(q_dim, kv.page_size, kv.pages.dtype)
    )


def takes_pages(head_dim: int, page_size: int, kv_dtype: Any) -> bool:
    """Whether `decode_rows` computes over pages of so many tokens."""
    fits = head_dim % MOST_LANES == 0 and (page_size == 8 or page_size % MOST_KEYS == 0)
    return fits and jnp.dtype(kv_dtype) in POOLS


def decode_rows(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    sinks: jax.Array | None,
    block_keys: int,
) -> jax.Array:
    """Attention of a batch's decode rows.

    Args:
        q: [T, Hq, D] packed queries.
        kv: pool [N, 2, Hkv, P, D] that `takes` says yes to.
        batch, params, sinks: see `attend_xla`.
        block_keys: keys of a block, at least a page's.

    Returns:
        [T, Hq, D] in q's dtype; zeros where there is no decode row.
    """
    scaled = q.astype(jnp.float32) * params.scale
    # Unsigned, so that no index is looked at for being negative.
    table, lens = batch.block_table.astype(jnp.uint32), batch.kv_lens.astype(jnp.uint32)
    num_rows = jnp.minimum(batch.num_decode_rows, min(q.shape[0], lens.shape[0]))
    ones = jnp.ones((_lanes(kv.pages.dtype),), jnp.float32)
    with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
        out = _attend(
            scaled,
            kv.pages,
            kv.scales,
            table,
            lens,
            num_rows.astype(jnp.uint32),
            sinks,
            lax.optimization_barrier(ones),  # a product with known ones becomes a plain sum
            params=params,
            block_keys=block_keys,
        )
    return out.astype(q.dtype)


def _lanes(pool_dtype: Any) -> int:
    """Products of a query and a key that are left to sum: the fewer the better, but LLVM unrolls a
    loop of 16 before it looks for vectors, and makes scalars of it, where its body is as short as
    float32's."""
    return MOST_LANES if jnp.dtype(pool_dtype) == jnp.float32 else 16


class _Row(NamedTuple):
    """What is carried from block to block of a row."""

    peak: jax.Array  # [Hq] largest score so far
    total: jax.Array  # [Hq] sum of weights
    acc: jax.Array  # [Hkv, G, D] sum of weighted values
    scores: jax.Array  # [B, Hkv·keys·G]


class _Pool(NamedTuple):
    """Pages as they are read: a row's parts of `keys` keys, counted from its first.

    `half` is 0 for keys, 1 for values.
    """

    pages: jax.Array  # [N, 2·Hkv, parts of a page, keys·D]
    scales: jax.Array | None  # [N, 2·Hkv, P]
    table: jax.Array  # [S, pages of a row]
    keys: int

    def numbers(
        self, row: jax.Array, part: jax.Array, half: int, begin: int, end: int
    ) -> jax.Array:
        """Float32 [Hkv, end - begin], before scales."""
        page_id, inner = self._place(row, part)
        heads = self.pages.shape[1] // 2
        at = (page_id, np.uint32(half * heads), inner, np.uint32(begin))
        found = lax.dynamic_slice(self.pages, at, (1, heads, 1, end - begin))
        return to_float32(found.reshape(heads, end - begin))

    def scales_of(self, row: jax.Array, part: jax.Array, half: int) -> jax.Array:
        """[Hkv, keys]."""
        assert self.scales is not None
        page_id, inner = self._place(row, part)
        heads = self.scales.shape[1] // 2
        at = (page_id, np.uint32(half * heads), inner * np.uint32(self.keys))
        return lax.dynamic_slice(self.scales, at, (1, heads, self.keys))[0]

    def _place(self, row: jax.Array, part: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The part's page, and which of the page's parts it is."""
        parts = np.uint32(self.pages.shape[2])
        page, inner = lax.div(part, parts), lax.rem(part, parts)
        return lax.dynamic_slice(self.table, (row, page), (1, 1))[0, 0], inner


@partial(jax.jit, static_argnames=("params", "block_keys"))
def _attend(
    q: jax.Array,
    pages: jax.Array,
    scales: jax.Array | None,
    table: jax.Array,
    lens: jax.Array,
    num_rows: jax.Array,
    sinks: jax.Array | None,
    ones: jax.Array,
    *,
    params: AttentionParams,
    block_keys: int,
) -> jax.Array:
    """`decode_rows` of scaled queries in float32.

    A page of more than `MOST_KEYS` keys is walked in parts; what is called a part below is a whole
    page where it is not.
    """
    num_pages, _, num_kv_heads, page_size, dim = pages.shape
    num_heads = q.shape[1]
    group = num_heads // num_kv_heads
    lanes, keys = ones.shape[0], min(page_size, MOST_KEYS)
    parts = page_size // keys
    block = max(1, min(block_keys // keys, table.shape[1] * parts))
    pool = _Pool(
        pages.reshape(num_pages, 2 * num_kv_heads, parts, keys * dim),
        None if scales is None else scales.reshape(num_pages, 2 * num_kv_heads, page_size),
        table,
        keys,
    )
    zero, one, per_block = np.uint32(0), np.uint32(1), np.uint32(block)
    scores_shape = (num_kv_heads, keys, group)
    narrow = pages.dtype != jnp.float32
    # Counted from an index, each number's place would be counted apart.
    of_part = np.tile(np.repeat(np.arange(keys, dtype=np.uint32), group), num_kv_heads)
    of_part = lax.optimization_barrier(jnp.asarray(of_part))

    def one_row(row: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, scores = state
        num_keys = lax.dynamic_slice(lens, (row,), (1,))[0]
        oldest = jnp.uint32(0)
        if params.sliding_window is not None:
            window = np.uint32(params.sliding_window)
            oldest = jnp.maximum(num_keys, window) - window
        begin = lax.div(oldest, np.uint32(keys))
        stop = lax.div(num_keys + np.uint32(keys - 1), np.uint32(keys))
        query = lax.dynamic_slice(q, (row, zero, zero), (1, num_heads, dim))
        query = lax.optimization_barrier(query.reshape(num_kv_heads, 1, group, dim))

        def one_block(index: jax.Array, seen: _Row) -> _Row:
            first = begin + index * per_block
            count = jnp.minimum(stop - first, per_block)

            def score(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                scores, peaks = state
                their_keys = pool.numbers(row, first + i, 0, 0, keys * dim)
                their_keys = their_keys.reshape(num_kv_heads, keys, 1, dim)
                spans = [slice(at, at + lanes) for at in range(0, dim, lanes)]
                products = query[..., spans[0]] * their_keys[..., spans[0]]
                for span in spans[1:]:
                    products = products + query[..., span] * their_keys[..., span]
                if pool.scales is not None:
                    products = products * pool.scales_of(row, first + i, 0)[..., None, None]
                products = lax.optimization_barrier(products)  # [Hkv, keys, G, lanes]
                found = _soft_cap(_sums(products, ones), params)
                at = (first + i) * np.uint32(keys) + of_part
                visible = at < num_keys
                if params.sliding_window is not None:
                    visible &= at >= oldest
                found = jnp.where(visible, found, np.float32(_MASKED))
                found = lax.optimization_barrier(found)
                scores = lax.dynamic_update_slice(scores, found[None], (i, zero))
                return scores, jnp.maximum(peaks, found)

            peaks = jnp.full((num_heads * keys,), _MASKED, jnp.float32)
            scores, peaks = lax.fori_loop(jnp.uint32(0), count, score, (seen.scores, peaks))
            peak = seen.peak
            for key in range(keys):
                peak = jnp.maximum(peak, peaks.reshape(scores_shape)[:, key].reshape(-1))
            shrink = jnp.exp(seen.peak - peak)
            wide_peak = peak.reshape(num_kv_heads, 1, group)
            wide_peak = jnp.broadcast_to(wide_peak, scores_shape)
            wide_peak = lax.optimization_barrier(wide_peak).reshape(-1)

            def weigh(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                totals, acc = state
                found = lax.dynamic_slice(scores, (i, zero), (1, num_heads * keys))[0]
                weights = lax.optimization_barrier(jnp.exp(found - wide_peak))
                by_head = weights.reshape(scores_shape)[..., None]
                values = None
                if narrow:  # widened once, not once for each query of the group
                    values = pool.numbers(row, first + i, 1, 0, keys * dim)
                    values = values.reshape(num_kv_heads, keys, dim)
                    if pool.scales is not None:
                        values = values * pool.scales_of(row, first + i, 1)[..., None]
                    values = lax.optimization_barrier(values)

                def weighted(key: int) -> jax.Array:
                    if values is None:
                        value = pool.numbers(row, first + i, 1, key * dim, (key + 1) * dim)
                    else:
                        value = values[:, key]
                    return by_head[:, key] * value[:, None]

                for key in range(0, keys, VALUES):
                    sums = [weighted(key), weighted(key + 1)]
                    for more in range(2, VALUES):
                        sums[more % 2] = sums[more % 2] + weighted(key + more)
                    acc = lax.optimization_barrier(acc + (sums[0] + sums[1]))
                return totals + weights, acc

            totals = jnp.zeros((num_heads * keys,), jnp.float32)
            acc = seen.acc * shrink.reshape(num_kv_heads, group, 1)
            totals, acc = lax.fori_loop(jnp.uint32(0), count, weigh, (totals, acc))
            total = seen.total * shrink
            for key in range(keys):
                total = total + totals.reshape(scores_shape)[:, key].reshape(-1)
            return _Row(peak, total, acc, scores)

        seen = _Row(
            jnp.full((num_heads,), _MASKED, jnp.float32),
            jnp.zeros((num_heads,), jnp.float32),
            jnp.zeros((num_kv_heads, group, dim), jnp.float32),
            scores,
        )
        num_blocks = lax.div(stop - begin + (per_block - one), per_block)
        seen = lax.fori_loop(jnp.uint32(0), num_blocks, one_block, seen)
        result = _result(seen, sinks).reshape(1, num_heads, dim)
        out = lax.dynamic_update_slice(out, result, (row, zero, zero))
        return out, seen.scores

    scores = jnp.zeros((block, num_heads * keys), jnp.float32)
    state = (jnp.zeros_like(q), scores)
    return lax.fori_loop(jnp.uint32(0), num_rows, one_row, state)[0]


def _sums(products: jax.Array, ones: jax.Array) -> jax.Array:
    """[Hkv·keys·G] of [Hkv, keys, G, lanes]."""
    return lax.dot_general(
        products.reshape(-1, ones.shape[0]),
        ones,
        dimension_numbers=(((1,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )


def _soft_cap(scores: jax.Array, params: AttentionParams) -> jax.Array:
    if params.logit_softcap is None:
        return scores
    cap = np.float32(params.logit_softcap)
    return cap * jnp.tanh(scores / cap)


def _result(seen: _Row, sinks: jax.Array | None) -> jax.Array:
    """[Hkv, G, D]: numerator over denominator; `sinks` are logits of keys without a value."""
    acc, total = seen.acc, jnp.maximum(seen.total, 1e-30)
    if sinks is not None:
        peak = jnp.maximum(seen.peak, sinks)
        shrink = jnp.exp(seen.peak - peak)
        acc = acc * shrink.reshape(*acc.shape[:2], 1)
        total = seen.total * shrink + jnp.exp(sinks - peak)
    return acc / total.reshape(*acc.shape[:2], 1)
