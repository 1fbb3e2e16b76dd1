"""Block-quantized products as native functions that XLA compiles: row by row, panel by panel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.compat import WIDE_VECTORS, as_one_function

if TYPE_CHECKING:  # their `apply` is this module's product
    from octavo.pallas_kernels.cpu.block_quantized_linear.weight import (
        BlockQuantizedWeight,
        PanelWeight,
    )

LANES = 16
"""Outputs whose codes lie side by side: float32 numbers of a 512-bit vector."""
PANEL = 64
"""Outputs that several rows multiply together: four such vectors."""
COMPILER_OPTIONS = WIDE_VECTORS
"""Of programs with such layers: 0.7 of the time of XLA's own 256 bits on a CPU with AVX-512."""
SUMS = 4
"""Sums that a block's products are added to in turn: as many additions may be on their way."""
HELD = 16
"""Inputs whose products with several rows are one sum: registers hold a vector of each."""


def block_quantized_linear(x: jax.Array, weight: BlockQuantizedWeight | PanelWeight) -> jax.Array:
    """x · weight, contracting x's last dimensions with the weight's inputs.

    Args:
        x: [T, *inputs] float32; each row takes as long as the first, but where the weight is in
            panels.
        weight: see `BlockQuantizedWeight` and, for several rows, `PanelWeight`.

    Returns:
        [T, *outputs] float32.

    Raises:
        ValueError: x's last dimensions are not the weight's inputs.
    """
    rows = x.reshape(x.shape[0], -1)
    num_inputs = weight.codes.shape[1] * _num_codes(weight)
    if rows.shape[1] != num_inputs or x.dtype != jnp.float32:
        raise ValueError(f"x {x.dtype} {x.shape}: want float32 [T, {num_inputs}]")
    with as_one_function():
        multiply = _panel_by_panel if weight.is_in_panels else _row_by_row
        out = multiply(rows, weight)
    num_outputs = int(np.prod(weight.outputs))
    return out[:, :num_outputs].reshape(x.shape[0], *weight.outputs)


def _num_codes(weight: BlockQuantizedWeight | PanelWeight) -> int:
    """C, codes a block."""
    return weight.codes.shape[-2] * (2 if weight.codes.dtype == jnp.uint8 else 1)


@jax.jit
def _row_by_row(x: jax.Array, weight: BlockQuantizedWeight) -> jax.Array:
    """[T, N] float32, N filled up to whole tiles, of x [T, K]."""
    _, num_blocks, groups, code_bytes, _ = weight.codes.shape
    tiles = weight.num_tiles
    num_rows, num_codes = x.shape[0], _num_codes(weight)
    # Unsigned, so that no index is looked at for being negative.
    zero = np.uint32(0)
    first_tile = None if weight.first_tile is None else weight.first_tile.astype(jnp.uint32)

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
            partial(add_block, tile=tile if first_tile is None else tile + first_tile),
            jnp.zeros((num_rows, groups, LANES), jnp.float32),
        )
        at = (zero, tile * np.uint32(groups * LANES))
        return jax.lax.dynamic_update_slice(out, one.reshape(num_rows, -1), at)

    out = jnp.zeros((num_rows, tiles * groups * LANES), jnp.float32)
    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(tiles), add_tile, out)


@jax.jit
def _panel_by_panel(x: jax.Array, weight: PanelWeight) -> jax.Array:
    """[T, N] float32, N filled up to whole panels, of x [T, K]."""
    num_panels, num_blocks, code_bytes, _ = weight.codes.shape
    num_rows, num_codes = x.shape[0], _num_codes(weight)
    parts, held = num_codes // code_bytes, min(HELD, code_bytes)
    zero = np.uint32(0)
    # By block, so that one place is made sure to lie within and not each input's.
    x = x.reshape(num_rows, num_blocks, num_codes)

    def dequantized(panel: jax.Array, block: jax.Array) -> list[jax.Array]:
        """The block's weights in parts, float32 [H, PANEL] each."""

        def widened(array: jax.Array) -> jax.Array:
            part = jax.lax.dynamic_slice(array, (panel, block, zero), (1, 1, PANEL))
            return part.reshape(1, PANEL).astype(jnp.float32)

        given = [each for each in (weight.scale, weight.minimum) if each is not None]
        # Made once, not for each row of codes.
        scale, *minimum = jax.lax.optimization_barrier([widened(each) for each in given])
        at = (panel, block, zero, zero)
        codes = jax.lax.dynamic_slice(weight.codes, at, (1, 1, code_bytes, PANEL))
        codes = codes.reshape(code_bytes, PANEL)
        halves = [codes] if parts == 1 else [codes & np.uint8(15), codes >> np.uint8(4)]
        made = [half.astype(jnp.float32) * scale for half in halves]
        if minimum:
            made = [each + minimum[0] for each in made]
        return jax.lax.optimization_barrier(made)

    def add_block(
        block: jax.Array, outs: tuple[jax.Array, ...], panel: jax.Array
    ) -> tuple[jax.Array, ...]:
        made = dequantized(panel, block)

        def add(out: jax.Array, lane: int) -> jax.Array:
            """Adds the block's products to [T, LANES] outputs of the panel, from `lane` on."""
            for first in range(0, num_codes, held):
                at = (zero, block, np.uint32(first))
                inputs = jax.lax.dynamic_slice(x, at, (num_rows, 1, held))
                part, code = divmod(first, code_bytes)
                # Inputs last: reductions of other dimensions are no part of a loop.
                weights = made[part][code : code + held, lane : lane + LANES].T
                out = out + _summed(inputs * weights[None])
            return out

        outs = tuple(add(out, group * LANES) for group, out in enumerate(outs))
        return jax.lax.optimization_barrier(outs)

    def add_panel(panel: jax.Array, out: jax.Array) -> jax.Array:
        groups = jax.lax.fori_loop(
            jnp.uint32(0),
            jnp.uint32(num_blocks),
            partial(add_block, panel=panel),
            tuple(jnp.zeros((num_rows, LANES), jnp.float32) for _ in range(PANEL // LANES)),
        )
        first = panel * np.uint32(PANEL)
        for group, one in enumerate(groups):
            at = (zero, first + np.uint32(group * LANES))
            out = jax.lax.dynamic_update_slice(out, one, at)
        return out

    out = jnp.zeros((num_rows, num_panels * PANEL), jnp.float32)
    return jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(num_panels), add_panel, out)


def _summed(products: jax.Array) -> jax.Array:
    """float32 [T, N] of [T, N, K]."""

    def add(one: jax.Array, other: jax.Array) -> jax.Array:
        # It changes nothing, but no plain sum is YNNPACK's, which a native function cannot call.
        total: jax.Array = jax.lax.reduce_precision(one + other, 8, 23)
        return total

    return jax.lax.reduce(products, np.float32(0), add, (2,))
