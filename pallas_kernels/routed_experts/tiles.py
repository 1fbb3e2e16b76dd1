"""Routed experts on a CPU: tiles of rows of one expert, one tile after the other.

A tile's weights are sliced out of the stack and multiplied as any linear layer's. The slice is a
copy, which costs about as much as the product with eight rows does: a tile is large enough to hold
nearly all rows of an average expert, and no larger, as products with empty rows cost as much as
others. Only tiles in use are computed, so that experts without rows, and rows that count nothing,
cost nothing.

One row alone is multiplied by native loops that read the stack itself, with the expert as a
coordinate: nothing is copied.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.cpu.native_expert_row import INPUTS, row_by_expert
from octavo.pallas_kernels.routed_experts.weights import (
    ExpertWeights,
    Gated,
    one_expert,
    sort_choices,
    summed,
)

MAX_TILE = 64
"""Rows of the largest tiles: from there on, the copy is a small part."""
_ONE_ROW_UP_TO = 0.25
"""Choices an expert, on average, up to which most experts have one row or none."""


def tile_rows(num_choices: int, num_experts: int) -> int:
    """Rows of a tile, for so many choices of so many experts."""
    average = num_choices / num_experts
    if average <= _ONE_ROW_UP_TO:
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
    rows: int | None = None,
) -> jax.Array:
    """See `routed_experts`.

    Args:
        rows: of a tile; None takes `tile_rows`.
    """
    num_tokens, num_chosen = chosen.shape
    num_experts, num_choices = weights.num_experts, num_tokens * num_chosen
    tile = tile_rows(num_choices, num_experts) if rows is None else rows
    by_expert = sort_choices(chosen, num_experts)
    tiles = -(-by_expert.sizes // tile)
    tiles_end, rows_end = jnp.cumsum(tiles), jnp.cumsum(by_expert.sizes)
    # Where each sorted choice stands among all tiles' rows; behind them, if it counts nothing.
    most_tiles = min(num_choices, num_experts) + num_choices // tile
    expert = jnp.minimum(by_expert.expert, num_experts - 1)
    within = jnp.arange(num_choices, dtype=jnp.int32) - (rows_end - by_expert.sizes)[expert]
    place = (tiles_end - tiles)[expert] * tile + within
    place = jnp.where(by_expert.expert < num_experts, place, most_tiles * tile)
    token = jnp.full((most_tiles * tile,), num_tokens, jnp.int32)
    token = token.at[place].set(by_expert.order // num_chosen, mode="drop")
    x_and_nothing = jnp.pad(x, ((0, 1), (0, 0)))
    reads_stack = tile == 1 and _has_native_rows(weights, x)

    def add_tile(number: jax.Array, outs: jax.Array) -> jax.Array:
        of = jnp.sum(tiles_end <= number, dtype=jnp.int32)
        inputs = x_and_nothing[jax.lax.dynamic_slice(token, (number * tile,), (tile,))]
        if reads_stack:
            out = _one_row(inputs[0], weights, of, gated)[None]
        else:
            out = one_expert(inputs, weights.of(of), gated)
        return jax.lax.dynamic_update_slice(outs, out, (number * tile, jnp.int32(0)))

    outs = jnp.zeros((most_tiles * tile, x.shape[1]), x.dtype)
    outs = jax.lax.fori_loop(jnp.int32(0), tiles_end[-1], add_tile, outs)
    at = jnp.zeros_like(place).at[by_expert.order].set(jnp.minimum(place, most_tiles * tile - 1))
    by_choice = outs[at].reshape(num_tokens, num_chosen, -1)
    return summed(by_choice, chosen, share, num_experts)


def _has_native_rows(weights: ExpertWeights, x: jax.Array) -> bool:
    """Whether all three weights are plain, in float32, and of whole `INPUTS`."""
    return x.dtype == jnp.float32 and all(
        isinstance(weight, jax.Array)
        and weight.dtype == jnp.float32
        and weight.shape[1] % INPUTS == 0
        for weight in (weights.gate, weights.up, weights.down)
    )


def _one_row(x: jax.Array, weights: ExpertWeights, expert: jax.Array, gated: Gated) -> jax.Array:
    """[E] of one row x [E]."""

    def product(row: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        out = row_by_expert(row, weight, expert)
        if bias is None:
            return out
        return out + jax.lax.dynamic_index_in_dim(bias, expert, 0, keepdims=False)

    assert isinstance(weights.gate, jax.Array)
    assert isinstance(weights.up, jax.Array)
    assert isinstance(weights.down, jax.Array)
    gate = product(x, weights.gate, weights.gate_bias)
    up = product(x, weights.up, weights.up_bias)
    return product(gated(gate, up), weights.down, weights.down_bias)
