"""Writes a step's new keys and values into their pages, in place when the pool is donated."""

from __future__ import annotations

import jax

from octavo.pallas_kernels.ragged_paged_attention.batch import PagedKV, RaggedBatch


def write_kv(kv: PagedKV, k: jax.Array, v: jax.Array, batch: RaggedBatch) -> PagedKV:
    """Scatters the new KV of each token to its page.

    Args:
        kv: pool, [N, Hkv, P, D] twice; updated in place under donation.
        k, v: [T, Hkv, D] new keys and values.
        batch: `token_page` and `token_offset` say where each goes; padding goes to page 0.

    Returns:
        The updated pool.
    """
    page, offset = batch.token_page, batch.token_offset
    return PagedKV(
        k=kv.k.at[page, :, offset].set(k.astype(kv.k.dtype), mode="promise_in_bounds"),
        v=kv.v.at[page, :, offset].set(v.astype(kv.v.dtype), mode="promise_in_bounds"),
    )
