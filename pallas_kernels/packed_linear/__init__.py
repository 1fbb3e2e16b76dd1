"""Linear layers on a CPU whose float32 weights are read as the checkpoint's few bits.

A step of one row reads every weight once and multiplies it once, so it takes as long as reading
takes. A block-quantized checkpoint says the same numbers in a sixth of the bytes: they are
dequantized in registers, code · scale + minimum in float32, which is bit for bit what the loader
makes of them, and multiplied in float32. Only the order of the sum differs from another product's.

XLA's CPU backend compiles it to one native function, loops and all, if the call says that it is
small and not to be inlined; each loop over a block's outputs is then vectorized, given that every
row of codes is a slice of its own (sliced as one array, it is copied first) and that vectors may be
512 bits wide (`COMPILER_OPTIONS`).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from octavo.pallas_kernels.packed_linear.reference import packed_linear_reference, unpacked
from octavo.pallas_kernels.packed_linear.weight import (
    LANES,
    Blocks,
    BlockType,
    PackedWeight,
    abstract_packed,
    common_type,
    pack,
)

__all__ = [
    "COMPILER_OPTIONS",
    "BlockType",
    "Blocks",
    "PackedWeight",
    "abstract_packed",
    "common_type",
    "pack",
    "packed_linear",
    "packed_linear_reference",
    "unpacked",
]

COMPILER_OPTIONS = {"xla_cpu_prefer_vector_width": "512"}
"""Of programs with such layers: 0.7 of the time of XLA's own 256 bits on a CPU with AVX-512."""
SUMS = 4
"""Sums that a block's products are added to in turn: as many additions may be on their way."""


def packed_linear(x: jax.Array, weight: PackedWeight) -> jax.Array:
    """x · weight, contracting x's last dimensions with the weight's inputs.

    Args:
        x: [T, *inputs] float32; each row takes as long as the first.
        weight: see `PackedWeight`.

    Returns:
        [T, *outputs] float32.

    Raises:
        ValueError: x's last dimensions are not the weight's inputs.
    """
    rows = x.reshape(x.shape[0], -1)
    num_inputs = weight.codes.shape[1] * _num_codes(weight)
    if rows.shape[1] != num_inputs or x.dtype != jnp.float32:
        raise ValueError(f"x {x.dtype} {x.shape}: want float32 [T, {num_inputs}]")
    with set_xla_metadata(xla_cpu_small_call="true", inlineable="false"):
        out = _product(rows, weight)
    num_outputs = int(np.prod(weight.outputs))
    return out[:, :num_outputs].reshape(x.shape[0], *weight.outputs)


def _num_codes(weight: PackedWeight) -> int:
    """C, codes a block."""
    return weight.codes.shape[3] * (2 if weight.codes.dtype == jnp.uint8 else 1)


@jax.jit
def _product(x: jax.Array, weight: PackedWeight) -> jax.Array:
    """[T, N] float32, N filled up to whole tiles, of x [T, K]."""
    tiles, num_blocks, groups, code_bytes, _ = weight.codes.shape
    num_rows, num_codes = x.shape[0], _num_codes(weight)
    # Unsigned, so that no index is looked at for being negative.
    zero = np.uint32(0)

    def widened(array: jax.Array, tile: jax.Array, block: jax.Array) -> jax.Array:
        """float32 [1, T / LANES, LANES] of scales or minima."""
        at = (tile, block, zero, zero)
        part = jax.lax.dynamic_slice(array, at, (1, 1, groups, LANES))
        return part.reshape(1, groups, LANES).astype(jnp.float32)

    def add_block(block: jax.Array, out: jax.Array, tile: jax.Array) -> jax.Array:
        def code_row(i: int) -> jax.Array:
            at = (tile, block, zero, np.uint32(i), zero)
            part = jax.lax.dynamic_slice(weight.codes, at, (1, 1, groups, 1, LANES))
            return part.reshape(1, groups, LANES)

        def codes(i: int) -> jax.Array:
            if weight.codes.dtype != jnp.uint8:
                return code_row(i)
            low = i < code_bytes
            return code_row(i) & np.uint8(15) if low else code_row(i - code_bytes) >> np.uint8(4)

        scale = widened(weight.scale, tile, block)
        minimum = None if weight.minimum is None else widened(weight.minimum, tile, block)
        first = block * np.uint32(num_codes)
        sums: list[jax.Array] = []
        for i in range(num_codes):
            weights = codes(i).astype(jnp.float32) * scale
            if minimum is not None:
                weights = weights + minimum
            inputs = jax.lax.dynamic_slice(x, (zero, first + np.uint32(i)), (num_rows, 1))
            product = inputs[:, :, None] * weights
            if i < SUMS:
                sums.append(product)
            else:
                sums[i % SUMS] = sums[i % SUMS] + product
        return out + ((sums[0] + sums[1]) + (sums[2] + sums[3]))

    def add_tile(tile: jax.Array, out: jax.Array) -> jax.Array:
        one = jax.lax.fori_loop(
            jnp.uint32(0),
            jnp.uint32(num_blocks),
            partial(add_block, tile=tile),
            jnp.zeros((num_rows, groups, LANES), jnp.float32),
        )
        at = (zero, tile * np.uint32(groups * LANES))
        return jax.lax.dynamic_update_slice(out, one.reshape(num_rows, -1), at)

    out = jnp.zeros((num_rows, tiles * groups * LANES), jnp.float32)
    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(tiles), add_tile, out)
