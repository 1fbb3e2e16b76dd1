"""Routed experts on a CPU: tiles of rows of one expert, one tile after the other.

A tile's weights are sliced out of the stack and multiplied as any linear layer's. A slice is a
copy, made of so many inputs at a time that a core's second cache holds it until it is read. That
costs about as much as the product with eight rows does. So a tile is large enough to hold nearly
all rows of an average expert. Of its rows those in use are multiplied, `UNIT` at a time, and only
tiles in use are computed: experts without rows, and rows that count nothing, cost nothing.

One row alone is multiplied by native loops that read the stack itself, with the expert as a
coordinate: nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.cpu.block_quantized_linear import BlockQuantizedWeight
from octavo.pallas_kernels.cpu.native_expert_row import INPUTS, row_by_expert
from octavo.pallas_kernels.linear_weight import LinearWeight, linear_weight, sliced_from_stack
from octavo.pallas_kernels.routed_experts.weights import (
    ExpertWeights,
    Gated,
    place_choices,
    sort_choices,
    summed,
    through,
)

MAX_TILE = 64
"""Rows of the largest tiles: from there on, the copy is a small part."""
UNIT = 8
"""Rows that are multiplied together: as fast as more of them, and few are empty."""
PART_BYTES = 1 << 20
"""Bytes of a weight that are copied at a time: what a core's second cache holds."""
LEAST_INPUTS = 64
"""Inputs that are worth a product of their own, however many bytes they are."""
ONE_ROW_UP_TO = 1.5
"""Choices an expert, on average, up to which rows go one by one where that copies nothing."""
COPIED_ROW_UP_TO = 0.25
"""The same where their weights are copied: most experts have one row or none."""


def tile_rows(num_choices: int, num_experts: int, is_copied: bool = False) -> int:
    """Rows of a tile, for so many choices of so many experts.

    Args:
        is_copied: one row's weights are, too.
    """
    average = num_choices / num_experts
    if average <= (COPIED_ROW_UP_TO if is_copied else ONE_ROW_UP_TO):
        return 1
    if average <= 1.5:
        return 4
    # Experts that are chosen by chance have so many rows, give or take the root.
    likely = average + 2 * math.sqrt(average)
    return min(MAX_TILE, 8 * math.ceil(likely / 8))


def tiled_experts(
    x: jax.Array,
    chosen: jax.Array,
    share: jax.Array,
    weights: ExpertWeights,
    gated: Gated,
    num_parts: int = 1,
    rows: int | None = None,
) -> jax.Array:
    """See `routed_experts`.

    Args:
        rows: of a tile; None takes `tile_rows`.
    """
    num_tokens, num_chosen = chosen.shape
    num_experts, num_choices = weights.num_experts, num_tokens * num_chosen
    tile = rows
    if tile is None:
        is_copied = not all(_is_read_in_place(stack, x) for stack in weights.stacks())
        tile = tile_rows(num_choices, num_experts * num_parts, is_copied)
    by_expert = sort_choices(chosen, num_experts)
    tiles = -(-by_expert.sizes // tile)
    tiles_end = jnp.cumsum(tiles)
    most_tiles = min(num_choices, num_experts) + num_choices // tile
    at, choice = place_choices(by_expert, (tiles_end - tiles) * tile, most_tiles * tile)
    token = choice // num_chosen  # of a place that none has, the first one

    def add_tile(number: jax.Array, outs: jax.Array) -> jax.Array:
        of = jnp.sum(tiles_end <= number, dtype=jnp.int32)
        inputs = x[jax.lax.dynamic_slice(token, (number * tile,), (tile,))]
        # Of the tile's rows, those that its expert's rows fill: whole units of them.
        left = by_expert.sizes[of] - (number - (tiles_end - tiles)[of]) * tile
        num_units = -(-jnp.minimum(left, tile) // UNIT)
        out = through(inputs, weights, gated, partial(_product, of, num_units))
        return jax.lax.dynamic_update_slice(outs, out, (number * tile, jnp.int32(0)))

    outs = jnp.zeros((most_tiles * tile, x.shape[1]), x.dtype)
    outs = jax.lax.fori_loop(jnp.int32(0), tiles_end[-1], add_tile, outs)
    by_choice = outs[at].reshape(num_tokens, num_chosen, -1)
    return summed(by_choice, chosen, share, num_experts)


def _product(
    expert: jax.Array,
    num_units: jax.Array,
    rows: jax.Array,
    stack: jax.Array | LinearWeight,
    bias: jax.Array | None,
) -> jax.Array:
    """Rows by one expert's weight; behind `num_units` units of rows, anything that is finite."""
    if isinstance(stack, LinearWeight):
        out = _unit_by_unit(rows, num_units, stack.of_stack(expert).apply)
    elif len(rows) == 1 and _is_read_in_place(stack, rows):
        out = row_by_expert(rows[0], stack, expert)[None]
    else:
        out = _part_by_part(rows, num_units, stack, expert)
    return out if bias is None else out + sliced_from_stack(bias, expert)[None]


def _is_read_in_place(stack: jax.Array | LinearWeight, x: jax.Array) -> bool:
    """Whether one row's product with one of a stack of weights copies nothing."""
    if isinstance(stack, LinearWeight):
        return isinstance(stack, BlockQuantizedWeight)
    return x.dtype == stack.dtype == jnp.float32 and stack.shape[1] % INPUTS == 0


def _unit_by_unit(
    rows: jax.Array,
    num_units: jax.Array,
    multiply: Callable[[jax.Array], jax.Array],
    out: jax.Array | None = None,
) -> jax.Array:
    """What `multiply` makes of rows [R, K], added to `out` if there is one."""
    if len(rows) <= UNIT:
        return multiply(rows) if out is None else out + multiply(rows)
    made = jax.eval_shape(multiply, jax.ShapeDtypeStruct((UNIT, rows.shape[1]), rows.dtype))

    def add(number: jax.Array, sums: jax.Array) -> jax.Array:
        at = (number * UNIT, jnp.int32(0))
        unit = multiply(jax.lax.dynamic_slice(rows, at, (UNIT, rows.shape[1])))
        if out is not None:
            unit = unit + jax.lax.dynamic_slice(sums, at, unit.shape)
        return jax.lax.dynamic_update_slice(sums, unit, at)

    sums = jnp.zeros((len(rows), made.shape[1]), made.dtype) if out is None else out
    return jax.lax.fori_loop(jnp.int32(0), num_units, add, sums)


def _part_by_part(
    rows: jax.Array, num_units: jax.Array, stack: jax.Array, expert: jax.Array
) -> jax.Array:
    """Rows by stack[expert], of which few inputs at a time are copied."""
    _, num_inputs, num_outputs = stack.shape
    most = max(PART_BYTES // (num_outputs * stack.dtype.itemsize), LEAST_INPUTS)
    num_parts = -(-num_inputs // most)
    while num_inputs % num_parts:
        num_parts += 1
    part = num_inputs // num_parts
    if part < LEAST_INPUTS // 2 or num_parts == 1:
        whole = linear_weight(sliced_from_stack(stack, expert))
        return _unit_by_unit(rows, num_units, whole.apply)

    def add(number: jax.Array, out: jax.Array) -> jax.Array:
        first, zero = number * part, jnp.int32(0)
        inputs = jax.lax.dynamic_slice(rows, (zero, first), (len(rows), part))
        at = (expert, first, zero)
        weight = jax.lax.dynamic_slice(stack, at, (1, part, num_outputs))[0]
        # Copied once, for all units.
        multiply = linear_weight(jax.lax.optimization_barrier(weight)).apply
        return _unit_by_unit(inputs, num_units, partial(multiply, out_dtype=out.dtype), out)

    out = jnp.zeros((len(rows), num_outputs), jnp.float32)
    out = jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_parts), add, out)
    return out.astype(rows.dtype)
