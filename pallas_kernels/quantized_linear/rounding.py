"""Numbers rounded to eight bits, with a scale for each slice of them."""

from __future__ import annotations

from typing import Literal, get_args

import jax
import jax.numpy as jnp

Quantization = Literal["int8", "fp8"]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

VALUE_DTYPES = {"int8": jnp.dtype(jnp.int8), "fp8": jnp.dtype(jnp.float8_e4m3fn)}
LARGEST = {"int8": 127.0, "fp8": 448.0}
"""The largest number a value takes; int8 leaves -128 out, so that the range is symmetric."""


def quantize(
    x: jax.Array, quantization: Quantization, dims: tuple[int, ...] | int
) -> tuple[jax.Array, jax.Array]:
    """x ≈ values · scale, with a scale for everything but `dims`.

    Args:
        x: any floating array.
        quantization: "int8" or "fp8".
        dims: over which one scale is shared.

    Returns:
        values of x's shape, and scale float32 of x's shape without `dims`. A slice of zeros has
        scale 0.
    """
    x_f32 = x.astype(jnp.float32)
    largest = jnp.float32(LARGEST[quantization])
    magnitude = jnp.max(jnp.abs(x_f32), axis=dims, keepdims=True)
    inverse = jnp.where(magnitude > 0, largest / magnitude, jnp.float32(0.0))
    scaled = x_f32 * inverse
    if quantization == "int8":
        scaled = jnp.round(scaled)
    # A quotient may round to just above the largest, which fp8 has no number for.
    values = jnp.clip(scaled, -largest, largest).astype(VALUE_DTYPES[quantization])
    return values, jnp.squeeze(magnitude / largest, axis=dims)
