"""int8 products of few rows on a CPU, as one native function that XLA compiles.

A step of one row reads every weight once, so it takes as long as reading takes, if multiplying
takes no longer. Written this way LLVM widens 16 weights an instruction to 16 bits, multiplies them
there, adds two such products, which 16 bits still hold (2 · 127² < 2¹⁵), and widens only their sum
to add it up in 32 bits: half the work of products in float32 or int32. The weight is read as it
lies. XLA's own library tiles for many rows, and takes twice as long for one.

As in `block_quantized_linear`, the call says that it is small and not to be inlined, so that one
function comes of all its loops, and vectors may be 512 bits wide (`COMPILER_OPTIONS`).

The plain reference is `quantized_linear_reference`, and `quantized_linear` gives the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.compat import WIDE_VECTORS, as_one_function
from octavo.pallas_kernels.linear_weight import EmbeddingTable
from octavo.pallas_kernels.quantized_linear import QuantizedWeight, quantize

COMPILER_OPTIONS = WIDE_VECTORS
"""Of programs with such products: 0.8 of the time of XLA's own 256 bits on a CPU with AVX-512."""
NATIVE_ROWS = 2
"""Most rows whose products are so: for four, XLA's library takes as long, for more less."""
LANES = 32
"""Inputs side by side that are multiplied together; a weight's inputs are whole ones."""
_UNROLLED = 64
"""Most times `LANES` inputs between two turns of a loop, whose sums go by memory."""
_SUMMED = 16
"""Sums that are left to one loop over them."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class NativeInt8Weight(EmbeddingTable):
    """A weight of int8 for programs of up to `NATIVE_ROWS` rows on one CPU device.

    If its inputs are no multiple of `LANES`, its products are `quantized_linear`'s.

    Attributes:
        weight: int8, the same arrays.
    """

    weight: QuantizedWeight

    def apply(self, x: jax.Array, num_inputs: int = 1, out_dtype: Any | None = None) -> jax.Array:
        if math.prod(x.shape[1:]) % LANES:
            return self.weight.apply(x, num_inputs, out_dtype)
        return native_int8_linear(x, self.weight).astype(
            x.dtype if out_dtype is None else out_dtype
        )

    def rows(self, ids: jax.Array) -> jax.Array:
        return self.weight.rows(ids)


def native_int8_linear(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """x · weight, rows rounded as in `quantized_linear`.

    Args:
        x: [T, *inputs], float32 or bfloat16.
        weight: of int8, its inputs a multiple of `LANES`.

    Returns:
        [T, *outputs] float32.

    Raises:
        ValueError: x's last dimensions are not the weight's inputs.
    """
    inputs = weight.values.shape[weight.scale.ndim :]
    if x.shape[1:] != inputs:
        raise ValueError(f"x {x.shape}: want [T, {', '.join(map(str, inputs))}]")
    values, row_scale = quantize(x, weight.quantization, tuple(range(1, x.ndim)))
    num_rows, outputs = len(values), weight.scale.shape
    by_output = weight.values.reshape(weight.scale.size, -1)
    out = native_product(values.reshape(num_rows, -1), by_output).reshape(num_rows, *outputs)
    by_row = row_scale.reshape(-1, *(1,) * len(outputs))
    return out.astype(jnp.float32) * (by_row * weight.scale[None])


def native_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x · weight, each row with each output.

    Args:
        x: int8 [T, K], without -128.
        weight: int8 [N, K], without -128; K is a multiple of `LANES`, at most 2¹⁷, so that 32 bits
            hold a sum.

    Returns:
        int32 [T, N], exact.
    """
    # What x is made of is not to be made again for each output.
    x = jax.lax.optimization_barrier(x)
    with as_one_function():
        return _output_by_output(x, weight)


@jax.jit
def _output_by_output(x: jax.Array, weight: jax.Array) -> jax.Array:
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    num_parts, num_left = divmod(num_inputs // LANES, _UNROLLED)
    # Unsigned, so that no index is looked at for being negative.
    zero = np.uint32(0)
    wide = jax.lax.optimization_barrier(x.astype(jnp.int16))

    def products(output: jax.Array, first: jax.Array | np.uint32) -> jax.Array:
        """int16 [T, LANES] of the inputs from `first` on."""
        weights = jax.lax.dynamic_slice(weight, (output, first), (1, LANES))
        inputs = jax.lax.dynamic_slice(wide, (zero, first), (num_rows, LANES))
        return weights.astype(jnp.int16) * inputs

    def sums(output: jax.Array, first: jax.Array | np.uint32, times: int) -> jax.Array:
        """int32 [T, LANES], over so many times `LANES` inputs."""
        firsts = [first + np.uint32(each * LANES) for each in range(times)]
        two_by_two = [
            (products(output, one) + products(output, other)).astype(jnp.int32)
            for one, other in zip(firsts[::2], firsts[1::2], strict=False)
        ]
        if times % 2:
            two_by_two.append(products(output, firsts[-1]).astype(jnp.int32))
        total = two_by_two[0]
        for each in two_by_two[1:]:
            total = total + each
        return total

    def add_output(output: jax.Array, out: jax.Array) -> jax.Array:
        parts = []
        if num_parts:
            parts.append(
                jax.lax.fori_loop(
                    jnp.uint32(0),
                    jnp.uint32(num_parts),
                    lambda part, total: (
                        total + sums(output, part * np.uint32(_UNROLLED * LANES), _UNROLLED)
                    ),
                    jnp.zeros((num_rows, LANES), jnp.int32),
                )
            )
        if num_left:
            parts.append(sums(output, np.uint32(num_parts * _UNROLLED * LANES), num_left))
        lanes = parts[0] if len(parts) == 1 else parts[0] + parts[1]
        lanes = jax.lax.optimization_barrier(lanes)
        while lanes.shape[1] > _SUMMED:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        one = jnp.sum(lanes, axis=1, keepdims=True)
        return jax.lax.dynamic_update_slice(out, one, (zero, output))

    out = jnp.zeros((num_rows, num_outputs), jnp.int32)
    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(num_outputs), add_output, out)
