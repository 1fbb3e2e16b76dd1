"""Ragged paged attention, plain and obviously right: every other implementation is held to it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.ragged_paged_attention.batch import (
    AttentionParams,
    PagedKV,
    RaggedBatch,
)
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import to_float32


def attend_reference(
    q: jax.Array,
    kv: PagedKV,
    batch: RaggedBatch,
    params: AttentionParams,
    *,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of packed queries over their rows' pages, one dense softmax a token.

    Gathers every row's whole block table: memory grows with T · M · P; for tests only.

    Args:
        q: [T, Hq, D] packed queries.
        kv: pool [N, 2, Hkv, P, D], or [N, 1, Hkv, P, D] of keys alone, the step's own KV already
            written.
        batch: see `RaggedBatch`.
        params: see `AttentionParams`.
        sinks: float32[Hq] a logit each head adds to the softmax's denominator; None is none.

    Returns:
        [T, Hq, D] in q's dtype, D as wide as values are; zeros for padding tokens and idle rows.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, page_size = kv.num_kv_heads, kv.page_size
    group = num_heads // num_kv_heads
    rows = batch.token_row
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    q_lens = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    position = (
        batch.kv_lens[rows] - q_lens[rows] + token - batch.cu_q_lens[:-1][rows]
    )  # [T] of the query in its sequence
    pages = batch.block_table[rows]  # [T, M]

    scales = None if kv.scales is None else kv.scales[..., :page_size]

    def dense(half: int) -> jax.Array:  # [T, Hkv, M·P, D]
        gathered = to_float32(kv.pages[:, half][pages])
        if scales is not None:
            by_number = scales[:, half][pages][..., None]
            if kv.value_size is not None:
                is_value = jnp.arange(head_dim) < kv.value_size
                by_number = jnp.where(is_value, by_number, scales[:, 1][pages][..., None])
            gathered = gathered * by_number
        gathered = gathered.transpose(0, 2, 1, 3, 4)
        return gathered.reshape(num_tokens, num_kv_heads, -1, head_dim)

    keys = dense(0)
    values = dense(1) if kv.value_size is None else keys[..., : kv.value_size]
    queries = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, group, head_dim)
    scores = jnp.einsum("thgd,thkd->thgk", queries, keys) * params.scale
    if params.logit_softcap is not None:
        scores = params.logit_softcap * jnp.tanh(scores / params.logit_softcap)
    key_position = jnp.arange(pages.shape[1] * page_size, dtype=jnp.int32)
    visible = key_position[None, :] <= position[:, None]
    if params.sliding_window is not None:
        visible &= key_position[None, :] > position[:, None] - params.sliding_window
    if params.attention_chunk is not None:
        chunk = params.attention_chunk
        visible &= key_position[None, :] // chunk == position[:, None] // chunk
    scores = jnp.where(visible[:, None, None, :], scores, -jnp.inf)
    live = (token < batch.cu_q_lens[batch.num_rows]) & (batch.kv_lens[rows] > 0)
    scores = jnp.where(live[:, None, None, None], scores, 0.0)
    if sinks is not None:  # one more key, whose value is zero
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, group, 1)
        scores = jnp.append(scores, jnp.broadcast_to(sink, (*scores.shape[:3], 1)), axis=-1)
        values = jnp.pad(values, ((0, 0), (0, 0), (0, 1), (0, 0)))
    out = jnp.einsum("thgk,thkd->thgd", jax.nn.softmax(scores, axis=-1), values)
    out = jnp.where(live[:, None, None, None], out, 0.0)
    return out.reshape(num_tokens, num_heads, -1).astype(q.dtype)
