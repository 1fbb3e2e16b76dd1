"""Routed experts, plain and obviously right: every token by every expert, and most of it unused."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.linear_weight import LinearWeight, linear_weight
from octavo.pallas_kernels.routed_experts.weights import ExpertWeights, Gated, through


def one_expert(x: jax.Array, weights: ExpertWeights, gated: Gated) -> jax.Array:
    """Rows [R, E] by the weights that `ExpertWeights.of` gave."""

    def product(
        rows: jax.Array, weight: jax.Array | LinearWeight, bias: jax.Array | None
    ) -> jax.Array:
        out = linear_weight(weight).apply(rows)
        return out if bias is None else out + bias[None]

    return through(x, weights, gated, product)


def routed_experts_reference(
    x: jax.Array, chosen: jax.Array, share: jax.Array, weights: ExpertWeights, gated: Gated
) -> jax.Array:
    """See `routed_experts`."""
    out = jnp.zeros(x.shape, jnp.float32)
    for expert in range(weights.num_experts):
        is_chosen = chosen == expert
        part = jnp.where(is_chosen, share, 0.0).sum(1, keepdims=True)
        whole = one_expert(x, weights.of(jnp.int32(expert)), gated).astype(jnp.float32)
        out = out + jnp.where(is_chosen.any(1, keepdims=True), whole * part, 0.0)
    return out.astype(x.dtype)
