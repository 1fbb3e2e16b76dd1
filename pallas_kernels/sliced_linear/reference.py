"""Sliced linear layers, plain and obviously right: the weight whole, then one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.sliced_linear.weight import BASE, SlicedWeight


def whole(weight: SlicedWeight) -> jax.Array:
    """The weight, float32 [*outputs, K]."""
    high, middle, low = (
        digit.astype(jnp.float32) for digit in (weight.high, weight.middle, weight.low)
    )
    rows = (high + (middle + low / BASE) / BASE) * weight.scale[:, None]
    return rows.reshape(*weight.outputs, -1)


def sliced_linear_reference(x: jax.Array, weight: SlicedWeight) -> jax.Array:
    """x · weight in float32.

    Args:
        x: [T, *inputs] float32.
        weight: see `SlicedWeight`.

    Returns:
        [T, *outputs] float32.
    """
    matrix = whole(weight).reshape(-1, weight.high.shape[1])
    out = jnp.matmul(x.reshape(len(x), -1), matrix.T, precision="highest")
    return out.reshape(len(x), *weight.outputs)
