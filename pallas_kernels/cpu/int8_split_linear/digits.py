"""How float32 numbers are cut into int8 digits.

Shape suffixes: K inputs, flattened.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = 127
"""Of a digit, either sign."""
BASE = 2.0 * LARGEST
"""A digit stands for so many of the next one: what rounding leaves is at most half of its own unit,
and half of a unit is LARGEST of the next."""
NUM_DIGITS = 3
"""log2(127 · 254 · 254 · 2) is 24: what three digits leave is 2^-24 of a row's largest number."""
MAX_INPUTS = (2**31 - 1) // (NUM_DIGITS * LARGEST**2)
"""Inputs of which `NUM_DIGITS` products of digits, summed, fit an int32: 44,000."""
_LANES = 16
_ROUNDER = np.float32(1.5 * 2**23)
"""Added to a float32 of small magnitude, it leaves the nearest integer in the last bits."""


def digits(rows: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """Rows of numbers as digits times a scale: number = (d₀ + d₁ / BASE + d₂ / BASE²) · scale.

    Args:
        rows: float32 [R, K].

    Returns:
        `NUM_DIGITS` arrays int8 [R, K], the first the most significant, and scales float32 [R, 1],
        not finite where a row isn't.
    """
    scale = jnp.maximum(_largest(rows), np.float32(1e-30)) * np.float32(1 / LARGEST)
    rest = rows / scale
    found = []
    for _ in range(NUM_DIGITS):
        # What `round` and a conversion make of it, without the conversion's care for numbers that
        # int32 does not hold, which XLA's CPU backend takes one by one. Made float32 again as an
        # integer: some versions of XLA take what is added and subtracted again for nothing.
        bits = jax.lax.bitcast_convert_type(rest + _ROUNDER, jnp.int32)
        digit = bits - _ROUNDER.view(np.int32)
        found.append(digit.astype(jnp.int8))
        rest = (rest - digit.astype(jnp.float32)) * np.float32(BASE)
    return found, scale


def _largest(rows: jax.Array) -> jax.Array:
    """Largest magnitudes [R, 1]: first down columns, which XLA's CPU backend takes side by side."""
    magnitude = jnp.abs(rows)
    num_rows, width = rows.shape
    if width % _LANES == 0:
        folded = magnitude.reshape(num_rows, width // _LANES, _LANES).max(1)
        magnitude = jax.lax.optimization_barrier(folded)
    return magnitude.max(1, keepdims=True)
