"""Random ragged batches, for tests and for the check an engine makes when it is built."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.ragged_paged_attention.batch import PagedKV, RaggedBatch
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import (
    KV_DTYPES,
    kv_quantization,
    stored_dtype,
    to_stored,
)
from octavo.pallas_kernels.ragged_paged_attention.kv_write import round_kv
from octavo.pallas_kernels.ragged_paged_attention.pool_layout import PoolLayout, pool_layout


def make_case(
    rng: np.random.Generator,
    rows: list[tuple[int, int]],
    *,
    num_tokens: int,
    num_rows: int,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    page_size: int = 8,
    table: int = 16,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    num_pages: int | None = None,
    layout: PoolLayout | None = None,
    as_bits: bool = True,
    value_size: int | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None, PagedKV, RaggedBatch]:
    """A batch of rows over a shuffled pool of random numbers.

    Args:
        rows: (new tokens, KV length with them) of each; rows of one token first are decode rows.
        kv_dtype: of the pool, a name of `KV_DTYPES`; None is `dtype`.
        num_tokens, num_rows: T and S, what the rows do not fill is padding.
        layout: of the pool, whose numbers beyond `head_dim` are zeros and whose scales beyond
            `page_size` are NaN; None is plain XLA's.
        as_bits: the pool holds narrow floats as plain XLA stores them, else as kernels take them.
        table: M, pages in a row of the block table.
        value_size: of a pool of keys alone.

    Returns:
        q [T, Hq, D], k and v [T, Hkv, D] (no v for a pool of keys alone), the pool and the batch.
    """
    num_heads, num_kv_heads = heads
    used = 1 + sum(-(-kv_len // page_size) for _, kv_len in rows)
    if num_pages is None:
        num_pages = used
    halves = 2 if value_size is None else 1
    pool = rng.standard_normal((num_pages, halves, num_kv_heads, page_size, head_dim))
    layout = layout or pool_layout("xla", head_dim, page_size, value_size)
    pool = np.pad(pool, ((0, 0),) * 4 + ((0, layout.head_dim - head_dim),))
    free = list(rng.permutation(num_pages - 1) + 1)
    block_table = np.zeros((num_rows, table), np.int32)
    kv_lens = np.zeros(num_rows, np.int32)
    cu = np.zeros(num_rows + 1, np.int32)
    token_row = np.zeros(num_tokens, np.int32)
    token_page = np.zeros(num_tokens, np.int32)
    token_offset = np.zeros(num_tokens, np.int32)
    for i, (q_len, kv_len) in enumerate(rows):
        for j in range(-(-kv_len // page_size)):
            block_table[i, j] = free.pop()
        kv_lens[i] = kv_len
        cu[i + 1] = cu[i] + q_len
        span = slice(cu[i], cu[i + 1])
        position = np.arange(kv_len - q_len, kv_len) if kv_len else np.zeros(q_len, np.int64)
        token_row[span] = i
        token_page[span] = block_table[i, position // page_size] if kv_len else 0
        token_offset[span] = position % page_size
    cu[len(rows) + 1 :] = cu[len(rows)]
    batch = RaggedBatch(
        block_table=jnp.asarray(block_table),
        kv_lens=jnp.asarray(kv_lens),
        cu_q_lens=jnp.asarray(cu),
        token_row=jnp.asarray(token_row),
        token_page=jnp.asarray(token_page),
        token_offset=jnp.asarray(token_offset),
        num_decode_rows=jnp.int32(sum(1 for _ in _leading_ones(rows))),
        num_rows=jnp.int32(len(rows)),
    )
    q = jnp.asarray(rng.standard_normal((num_tokens, num_heads, head_dim)), dtype)
    k, v = jnp.asarray(rng.standard_normal((2, num_tokens, num_kv_heads, head_dim)), dtype)
    stored = jnp.dtype(dtype)
    if kv_dtype is not None:
        stored = stored_dtype(KV_DTYPES[kv_dtype]) if as_bits else KV_DTYPES[kv_dtype]
    kv = _pool(jnp.asarray(pool, jnp.float32), stored=stored, layout=layout)
    return q, k, v if value_size is None else None, kv, batch


@partial(jax.jit, static_argnames=("stored", "layout"))
def _pool(numbers: jax.Array, stored: jnp.dtype, layout: PoolLayout) -> PagedKV:
    quantization = kv_quantization(stored)
    pages, scales = numbers, None
    if quantization is not None:
        pages, scales = round_kv(pages, quantization, layout.value_size)
        beyond = ((0, 0),) * 3 + ((0, layout.scale_width - layout.page_size),)
        scales = jnp.pad(scales, beyond, constant_values=jnp.nan)
    kv = PagedKV(pages=to_stored(pages, stored), scales=scales, value_size=layout.value_size)
    is_in_one_row = layout.halves == 1 and not kv.holds_keys_alone
    return kv.side_by_side() if is_in_one_row else kv


def _leading_ones(rows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    lead = []
    for row in rows:
        if row[0] != 1:
            break
        lead.append(row)
    return lead
