"""Quantized linear layers, plain and obviously right: what each platform's product is held to."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.quantized_linear.rounding import quantize
from octavo.pallas_kernels.quantized_linear.weight import QuantizedWeight


def quantized_linear_reference(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Rounds each row of x as the weight is rounded, then multiplies in float32.

    Args:
        x: [T, *inputs].
        weight: see `QuantizedWeight`.

    Returns:
        [T, *outputs] float32.
    """
    num_tokens = x.shape[0]
    values, scale = quantize(x.reshape(num_tokens, -1), weight.quantization, -1)
    rounded = values.astype(jnp.float32) * scale[:, None]
    matrix = weight.values.astype(jnp.float32).reshape(weight.scale.size, -1)
    out = jnp.matmul(rounded, matrix.T, precision="highest") * weight.scale.reshape(1, -1)
    return out.reshape(num_tokens, *weight.scale.shape)
