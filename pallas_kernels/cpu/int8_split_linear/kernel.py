"""The product of float32 rows and an int8-split weight, from int8 products of their digits."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.cpu.int8_split_linear.digits import BASE, digits

if TYPE_CHECKING:  # its `apply` is this module's product
    from octavo.pallas_kernels.cpu.int8_split_linear.weight import Int8SplitWeight

CHUNK = 128
"""Rows computed together: with fewer, weights are packed more often than they need be."""


def int8_split_linear(x: jax.Array, weight: Int8SplitWeight) -> jax.Array:
    """x · weight, contracting x's last dimensions with the weight's inputs.

    Args:
        x: [T, *inputs] float32.
        weight: see `Int8SplitWeight`.

    Returns:
        [T, *outputs] float32.

    Raises:
        ValueError: x's last dimensions are not the weight's inputs.
    """
    num_rows = x.shape[0]
    num_inputs = weight.high.shape[1]
    rows = x.reshape(num_rows, -1)
    if rows.shape[1] != num_inputs or x.dtype != jnp.float32:
        raise ValueError(f"x {x.dtype} {x.shape}: want float32 [T, {num_inputs}]")
    if num_rows <= CHUNK:
        out = _product(rows, weight)
    else:
        chunks = jnp.pad(rows, ((0, -num_rows % CHUNK), (0, 0))).reshape(-1, CHUNK, num_inputs)
        out = jax.lax.map(partial(_product, weight=weight), chunks)
        out = out.reshape(-1, out.shape[2])[:num_rows]
    return out.reshape(num_rows, *weight.outputs)


def _product(rows: jax.Array, weight: Int8SplitWeight) -> jax.Array:
    """[T, N] of rows [T, K]."""
    num_rows = rows.shape[0]
    found, scale = digits(rows)
    # All digits, the most significant first, made once and not for each of their products.
    x, scale = jax.lax.optimization_barrier((jnp.concatenate(found), scale))
    high = _sums(x, weight.high)
    middle = _sums(x[: 2 * num_rows], weight.middle)
    low = _sums(x[:num_rows], weight.low)
    # By the order of what a product of two digits stands for: 1, 1 / BASE, 1 / BASE².
    first = high[:num_rows]
    second = high[num_rows : 2 * num_rows] + middle[:num_rows]
    third = high[2 * num_rows :] + middle[num_rows:] + low
    step = np.float32(1 / BASE)
    total = _float(first) + step * (_float(second) + step * _float(third))
    return total * scale * weight.scale


def _sums(x: jax.Array, weight: jax.Array) -> jax.Array:
    """int32 [R, N] of int8 [R, K] and [N, K]."""
    return jax.lax.dot_general(
        x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
    )


def _float(sums: jax.Array) -> jax.Array:
    return sums.astype(jnp.float32)
