"""Routed experts by ragged products: rows sorted by their expert, a group of rows an expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.linear_weight import LinearWeight
from octavo.pallas_kernels.packed_linear import PackedWeight
from octavo.pallas_kernels.quantized_linear import QuantizedWeight, ragged_quantized_linear
from octavo.pallas_kernels.routed_experts.weights import (
    ExpertWeights,
    Gated,
    Sorted,
    sort_choices,
    summed,
    through,
)


def ragged_experts(
    x: jax.Array, chosen: jax.Array, share: jax.Array, weights: ExpertWeights, gated: Gated
) -> jax.Array:
    """See `routed_experts`."""
    num_tokens, num_chosen = chosen.shape
    by_expert = sort_choices(chosen, weights.num_experts)

    def product(
        rows: jax.Array, weight: jax.Array | LinearWeight, bias: jax.Array | None
    ) -> jax.Array:
        out = _product(rows, weight, by_expert)
        return out if bias is None else out + jnp.take(bias, by_expert.expert, 0, mode="clip")

    out = through(x[by_expert.order // num_chosen], weights, gated, product)
    outs = out[jnp.argsort(by_expert.order)].reshape(num_tokens, num_chosen, -1)
    return summed(outs, chosen, share, weights.num_experts)


def _product(x: jax.Array, weight: jax.Array | LinearWeight, by_expert: Sorted) -> jax.Array:
    if isinstance(weight, QuantizedWeight):
        return ragged_quantized_linear(x, weight, by_expert.sizes, by_expert.expert)
    if isinstance(weight, PackedWeight):
        weight = weight.dequantized_for(x).swapaxes(1, 2)
    if isinstance(weight, LinearWeight):
        raise TypeError(f"{type(weight).__name__} has no ragged product")
    is_float32 = x.dtype == jnp.float32
    out: jax.Array = jax.lax.ragged_dot(
        x,
        weight,
        by_expert.sizes,
        precision=jax.lax.Precision.HIGHEST if is_float32 else jax.lax.Precision.DEFAULT,
        preferred_element_type=x.dtype,
    )
    return out
