"""Writes a step's new keys and values into their pages, in place when the pool is donated."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.ragged_paged_attention.batch import PagedKV, RaggedBatch


def write_kv(kv: PagedKV, k: jax.Array, v: jax.Array, batch: RaggedBatch) -> PagedKV:
    """Scatters the new KV of each token to its page.

    Args:
        kv: pool [N, 2, Hkv, P, D]; updated in place under donation.
        k, v: [T, Hkv, D] new keys and values.
        batch: `token_page` and `token_offset` say where each goes; padding goes to page 0.

    Returns:
        The updated pool.
    """
    new = jnp.stack([k, v], axis=1).astype(kv.pages.dtype)  # [T, 2, Hkv, D]
    where = kv.pages.at[batch.token_page, :, :, batch.token_offset]
    return PagedKV(pages=where.set(new, mode="promise_in_bounds"))
