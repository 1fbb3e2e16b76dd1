"""Writes a step's new keys and values into their pages, in place when the pool is donated."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.quantized_linear.rounding import Quantization, quantize
from octavo.pallas_kernels.ragged_paged_attention.batch import PagedKV, RaggedBatch
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import (
    kv_quantization,
    to_stored,
)


def write_kv(kv: PagedKV, k: jax.Array, v: jax.Array | None, batch: RaggedBatch) -> PagedKV:
    """Scatters the new KV of each token to its page, rounded to the pool's dtype.

    Args:
        kv: pool [N, 2, Hkv, P, D], or [N, 1, Hkv, P, D] of keys alone; updated in place under
            donation.
        k, v: [T, Hkv, D] new keys and values; no values for a pool of keys alone.
        batch: `token_page` and `token_offset` say where each goes; padding goes to page 0.

    Returns:
        The updated pool.
    """
    scales = kv.scales
    new = k[:, None] if v is None else jnp.stack([k, v], axis=1)  # [T, 2, Hkv, D]
    quantization = kv_quantization(kv.pages.dtype)
    if scales is not None and quantization is not None:
        new, scale = round_kv(new, quantization, kv.value_size)
        where = scales.at[batch.token_page, :, :, batch.token_offset]
        scales = where.set(scale, mode="promise_in_bounds")
    where = kv.pages.at[batch.token_page, :, :, batch.token_offset]
    new = to_stored(new, kv.pages.dtype)
    return replace(kv, pages=where.set(new, mode="promise_in_bounds"), scales=scales)


def round_kv(
    new: jax.Array, quantization: Quantization, value_size: int | None
) -> tuple[jax.Array, jax.Array]:
    """Keys and values in eight bits, and their scales.

    Args:
        new: [N, 2, ..., D], or [N, 1, ..., D] of keys alone.
        quantization: how.
        value_size: of `PagedKV`.

    Returns:
        As new, and float32 [N, 2, ...].
    """
    if value_size is None:
        return quantize(new, quantization, -1)
    parts = jnp.split(new, [value_size], axis=-1)
    numbers, scales = zip(*(quantize(part, quantization, -1) for part in parts), strict=True)
    return jnp.concatenate(numbers, axis=-1), jnp.concatenate(scales, axis=1)
