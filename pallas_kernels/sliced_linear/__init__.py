"""Linear layers in float32 on a CPU whose matrix unit multiplies int8 (Intel's AMX).

Such a unit multiplies eight bits ten times as fast as a core's vectors multiply float32. A float32
number is, to 24 bits of the largest of its row, a sum of three int8 digits (`digits`), and of the
nine products of two numbers' digits, six matter: what the other three add is below a rounding of
the sum in float32. Sums of a digit's products are exact in int32, so errors come from the cut
alone: two to four times those of a product in float32, whose every addition rounds.

Source: Ozaki, Ogita, Oishi, Rump, "Error-free transformations of matrix multiplication by using
fast routines of matrix multiplication", Numer. Algorithms 59 (2012); on integer units Ootomo,
Ozaki, Yokota, arXiv 2306.11975. Here with a base of 254 instead of a power of two, which rounding
to the nearest digit allows: 24 bits of three digits.

XLA's own int8 products serve. A weight's digit meets all digits of x that matter for it in one
product, rows upon rows, so that each of its three bytes is packed once. The sums, six numbers for
each of the result, are to stay in a core's caches until they are added up: more than `CHUNK` rows
go in chunks.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.sliced_linear.reference import sliced_linear_reference, whole
from octavo.pallas_kernels.sliced_linear.weight import (
    BASE,
    MAX_INPUTS,
    SlicedWeight,
    digits,
    slice_weight,
)

__all__ = [
    "BASE",
    "MAX_INPUTS",
    "SlicedWeight",
    "digits",
    "slice_weight",
    "sliced_linear",
    "sliced_linear_reference",
    "whole",
]


CHUNK = 128
"""Rows computed together: with fewer, weights are packed more often than they need be."""


def sliced_linear(x: jax.Array, weight: SlicedWeight) -> jax.Array:
    """x · weight, contracting x's last dimensions with the weight's inputs.

    Args:
        x: [T, *inputs] float32.
        weight: see `SlicedWeight`.

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


def _product(rows: jax.Array, weight: SlicedWeight) -> jax.Array:
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
