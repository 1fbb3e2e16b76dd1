"""What a pooled step returns beside tokens: hidden states, summed by row.

The host decides which tokens a request pools (all, the last, the first) as it packs the step; the
device only sums. So one program serves every kind of pooling, beside rows that generate.

Legend: T tokens, U prefill rows, E hidden.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from octavo.models.config import ModelConfig

NO_ROW = 2**31 - 1
"""The row of a token that no request pools: what is added to it is dropped."""


def pool_hidden(
    config: ModelConfig, weights: Any, hidden: jax.Array, pool_row: jax.Array, num_rows: int
) -> jax.Array:
    """Sums of the hidden states that each prefill row pools.

    Args:
        hidden: [T, E], before the final norm, which is applied here.
        pool_row: int32[T], for each token the prefill row that pools it, from 0; or `NO_ROW`.
        num_rows: U.

    Returns:
        float32[U, E]; zeros in rows that pool nothing. A token that is not finite is seen in the
        row that pools it, and in no other.
    """
    with jax.named_scope("pool_hidden"):
        normed = config.final_norm(hidden, weights, "final_norm").astype(jnp.float32)
        sums = jnp.zeros((num_rows, normed.shape[1]), jnp.float32)
        return sums.at[pool_row].add(normed, mode="drop")
