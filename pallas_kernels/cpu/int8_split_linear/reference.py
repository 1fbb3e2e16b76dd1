"""Int8-split linear layers, plain and obviously right: the weight whole, then one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.cpu.int8_split_linear.digits import BASE
from octavo.pallas_kernels.cpu.int8_split_linear.weight import Int8SplitWeight


def whole(weight: Int8SplitWeight) -> jax.Array:
    """The weight, float32 [*outputs, K]."""
    high, middle, low = (
        digit.astype(jnp.float32) for digit in (weight.high, weight.middle, weight.low)
    )
    rows = (high + (middle + low / BASE) / BASE) * weight.scale[:, None]
    return rows.reshape(*weight.outputs, -1)


def int8_split_linear_reference(x: jax.Array, weight: Int8SplitWeight) -> jax.Array:
    """x · weight in float32.

    Args:
        x: [T, *inputs] float32.
        weight: see `Int8SplitWeight`.

    Returns:
        [T, *outputs] float32.
    """
    matrix = whole(weight).reshape(-1, weight.high.shape[1])
    out = jnp.matmul(x.reshape(len(x), -1), matrix.T, precision="highest")
    return out.reshape(len(x), *weight.outputs)
