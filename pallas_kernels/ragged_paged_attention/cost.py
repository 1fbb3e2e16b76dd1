"""What attention must cost: the two floors, bytes and floating-point operations."""

from __future__ import annotations

from jax.experimental import pallas as pl


def attention_cost(
    *,
    num_queries: int,
    context: int,
    kv_reads: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_itemsize: int,
    kv_itemsize: int,
    scale_bytes: int = 0,
    value_size: int | None = None,
) -> pl.CostEstimate:
    """Cost of `num_queries` queries that each see `context` keys.

    Args:
        num_queries: query tokens.
        context: keys each sees.
        kv_reads: times a context's KV is read from memory: rows for decode, tiles for prefill.
        q_itemsize, kv_itemsize: bytes a number.
        scale_bytes: of a token's key or value in one head, where the pool keeps scales.
        value_size: where values are the first so many numbers of keys; None where they lie apart.

    Returns:
        Two products of 2 · D operations a (query head, key); queries read, outputs written, and
        keys and values read `kv_reads` times.
    """
    value_dim = head_dim if value_size is None else value_size
    rows = 2 if value_size is None else 1
    return pl.CostEstimate(
        flops=2 * num_queries * num_heads * (head_dim + value_dim) * context,
        transcendentals=num_queries * num_heads * context,
        bytes_accessed=num_queries * num_heads * (head_dim + value_dim) * q_itemsize
        + kv_reads * context * num_kv_heads * (rows * head_dim * kv_itemsize + 2 * scale_bytes),
    )
