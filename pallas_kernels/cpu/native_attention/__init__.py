"""Decode rows on a CPU: attention of all of them as one native function.

XLA's CPU backend compiles a call that says it is small, and is not to be inlined, into one
function, loops and all, so that no small operation is handed out one by one. It walks row by row
and, in a row, through its pages in the order of memory: a page's keys head by head, what they
weigh, then its values head by head (`row.py`).

Such a function is compiled anew for each layer, 0.17 s where the path of products takes 0.04, so
programs that an engine waits for before it is ready ("quick" ones) do without.

The plain reference is `ragged_paged_attention/reference.py`, as of every attention.

Data movement: a key or value is read once, from the pool itself, page after page without a gap
where a row's pages follow each other. Copying pages side by side first, as fast as memory gives
them, takes as long or longer: the copies go to L2 and come back from there. Touching pages that
come next takes longer than both one after the other: a core has few loads on their way, and they
hold up whatever comes after them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from octavo.pallas_kernels.compat import WIDE_VECTORS, as_one_function
from octavo.pallas_kernels.cpu.native_attention.row import (
    UNIT_KEYS,
    Place,
    Pool,
    Row,
    walk_row,
)
from octavo.pallas_kernels.ragged_paged_attention.backends import Backend
from octavo.pallas_kernels.ragged_paged_attention.batch import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
)
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import stored_dtype
from octavo.pallas_kernels.tuning import CPU, tuning_device

COMPILER_OPTIONS = WIDE_VECTORS
"""On a CPU with AVX-512 it takes 0.8 of the time of XLA's own 256 bits; others ignore it."""
MOST_LANES = 32
POOLS = tuple(stored_dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.int8))
"""What XLA makes float32 of in vectors: fp8 it takes number by number, and products read that
faster."""


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
        and not kv.holds_keys_alone
        and q_dim == kv.head_dim
        and takes_pages(q_dim, kv.page_size, kv.pages.dtype)
    )


def takes_pages(head_dim: int, page_size: int, kv_dtype: Any) -> bool:
    """Whether `decode_rows` computes over pages of so many tokens."""
    fits = head_dim % MOST_LANES == 0 and (page_size == 8 or page_size % UNIT_KEYS == 0)
    return fits and jnp.dtype(kv_dtype) in POOLS


def decode_rows(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    sinks: jax.Array | None,
) -> jax.Array:
    """Attention of a batch's decode rows.

    Args:
        q: [T, Hq, D] packed queries.
        kv: pool [N, 2, Hkv, P, D] that `takes` says yes to.
        batch, params, sinks: see `attend_xla`.

    Returns:
        [T, Hq, D] in q's dtype; zeros where there is no decode row.
    """
    scaled = q.astype(jnp.float32) * params.scale
    # Unsigned, so that no index is looked at for being negative.
    table, lens = batch.block_table.astype(jnp.uint32), batch.kv_lens.astype(jnp.uint32)
    num_rows = jnp.minimum(batch.num_decode_rows, min(q.shape[0], lens.shape[0]))
    ones = jnp.ones((_lanes(kv.pages.dtype),), jnp.float32)
    with as_one_function():
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
        )
    return out.astype(q.dtype)


def _lanes(pool_dtype: Any) -> int:
    """Products of a query and a key that are left to sum: the fewer the better, but LLVM unrolls a
    loop of 16 before it looks for vectors, and makes scalars of it, where its body is as short as
    float32's."""
    return MOST_LANES if jnp.dtype(pool_dtype) == jnp.float32 else 16


@partial(jax.jit, static_argnames=("params",))
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
) -> jax.Array:
    """`decode_rows` of scaled queries in float32."""
    pool = Pool.of(pages, scales)
    num_heads, dim = q.shape[1:]
    group = num_heads // pool.num_heads
    page_size = pages.shape[3]
    zero = np.uint32(0)

    def one_row(row: jax.Array, out: jax.Array) -> jax.Array:
        num_keys = lax.dynamic_slice(lens, (row,), (1,))[0]
        oldest = jnp.uint32(0)
        if not params.sees_all:
            last = jnp.maximum(num_keys, np.uint32(1)).astype(jnp.int32) - np.int32(1)
            oldest = params.first_visible(last).astype(jnp.uint32)
        query = lax.dynamic_slice(q, (row, zero, zero), (1, num_heads, dim))
        query = lax.optimization_barrier(query.reshape(pool.num_heads, 1, group, dim))
        this = Row(pool, params, ones, query, num_keys, oldest)

        def place_of(key: jax.Array) -> Place:
            page, inner = lax.div(key, np.uint32(page_size)), lax.rem(key, np.uint32(page_size))
            page_id = lax.dynamic_slice(table, (row, page), (1, 1))[0, 0]
            return Place(page_id, lax.div(inner, np.uint32(pool.keys)))

        result = _result(*walk_row(this, place_of, page_size), sinks).reshape(1, num_heads, dim)
        return lax.dynamic_update_slice(out, result, (row, zero, zero))

    return lax.fori_loop(jnp.uint32(0), num_rows, one_row, jnp.zeros_like(q))


def _result(
    peak: jax.Array, total: jax.Array, acc: jax.Array, sinks: jax.Array | None
) -> jax.Array:
    """[Hkv, G, D]: numerator over denominator; `sinks` are logits of keys without a value.

    Args:
        peak: [Hq] what weights were taken relative to.
        total: [Hq] sum of weights.
        acc: [Hkv, G, D] sum of weighted values.
    """
    if sinks is not None:
        new_peak = jnp.maximum(peak, sinks)
        shrink = jnp.exp(peak - new_peak)
        acc = acc * shrink.reshape(*acc.shape[:2], 1)
        total = total * shrink + jnp.exp(sinks - new_peak)
    return acc / jnp.maximum(total, 1e-30).reshape(*acc.shape[:2], 1)
