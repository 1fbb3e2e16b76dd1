"""Block-quantized linear layers, plain and obviously right: the weight whole, then one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.cpu.block_quantized_linear.weight import BlockQuantizedWeight


def dequantized(weight: BlockQuantizedWeight) -> jax.Array:
    """The weight, float32 [*outputs, K]."""
    codes = weight.codes
    if codes.dtype == jnp.uint8:
        codes = jnp.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=3)
    values = codes.astype(jnp.float32) * weight.scale.astype(jnp.float32)[:, :, :, None]
    if weight.minimum is not None:
        values = values + weight.minimum.astype(jnp.float32)[:, :, :, None]
    tiles, num_blocks, groups, num_codes, lanes = values.shape
    rows = values.transpose(0, 2, 4, 1, 3).reshape(tiles * groups * lanes, num_blocks * num_codes)
    num_outputs = int(np.prod(weight.outputs))
    return rows[:num_outputs].reshape(*weight.outputs, num_blocks * num_codes)


def block_quantized_linear_reference(x: jax.Array, weight: BlockQuantizedWeight) -> jax.Array:
    """x · weight in float32.

    Args:
        x: [T, *inputs] float32.
        weight: see `BlockQuantizedWeight`.

    Returns:
        [T, *outputs] float32.
    """
    matrix = dequantized(weight)
    rows = x.reshape(len(x), -1)
    out = jnp.matmul(rows, matrix.reshape(-1, matrix.shape[-1]).T, precision="highest")
    return out.reshape(len(x), *weight.outputs)
