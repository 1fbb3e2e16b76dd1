"""The search for the likeliest token among blocks of tokens, those with the largest bounds first.

Shapes: S rows, V the vocabulary, E inputs, N blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

if TYPE_CHECKING:  # its `argmax` is this module's search
    from octavo.pallas_kernels.cpu.bounded_argmax.logit_bounds import LogitBounds

BLOCK = 16
"""Tokens that are looked at together, or not at all."""
CHUNK = 1024
"""Tokens whose bounds are computed together."""
LIFT = np.float32(1 + 2.0**-7)
"""Norms are multiplied by it before they are rounded to bfloat16, which takes 2^-8 at the most."""
MAX_BLOCKS = 16
"""Blocks a row looks at: one that needs more is told by all logits in float32."""


def bounded_argmax(
    x: Array, weight: Array, bounds: LogitBounds, active: Array
) -> tuple[Array, Array]:
    """Position of the largest entry of each row of x · weightᵀ, the lowest among equals.

    Args:
        x: float32 [S, E].
        weight: float32 [V, E].
        bounds: of the weight.
        active: bool [S]; of the others nothing is computed that costs much.

    Returns:
        Positions int32 [S], and bool [S]: whether it is certain. Where it is not (many tokens
        almost equal, or a row that is not finite) the position is of no meaning. Inactive rows are
        certain, and have no meaning either.
    """
    num_rows, num_inputs = x.shape
    vocab_size = weight.shape[0]
    bounds_SN = block_bounds(x, bounds)
    most = min(MAX_BLOCKS, bounds_SN.shape[1] - 1)
    # The one after the last that is looked at says what all others are below.
    bound_SK, block_SK = lax.top_k(bounds_SN, most + 1)

    def is_open(state: tuple[Array, Array, Array]) -> Array:
        number, best_S, _ = state
        bound_S = lax.dynamic_index_in_dim(bound_SK, number, 1, keepdims=False)
        return (number < most) & ((bound_S >= best_S) & active).any()

    def look(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, best_S, where_S = state
        block_S = lax.dynamic_index_in_dim(block_SK, number, 1, keepdims=False)
        token_SB = jnp.minimum(
            block_S[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32), vocab_size - 1
        )
        # A copy, made by one: fused into the product it would be made number by number.
        rows = lax.optimization_barrier(weight[token_SB.reshape(-1)])
        logits_SB = (rows.reshape(num_rows, BLOCK, num_inputs) * x[:, None]).sum(-1)
        inside_S = jnp.argmax(logits_SB, axis=1)
        found_S = jnp.take_along_axis(token_SB, inside_S[:, None], axis=1)[:, 0]
        top_S = logits_SB.max(axis=1)
        is_better = (top_S > best_S) | ((top_S == best_S) & (found_S < where_S))
        return (
            number + 1,
            jnp.where(is_better, top_S, best_S),
            jnp.where(is_better, found_S, where_S),
        )

    nothing = jnp.full(num_rows, -jnp.inf), jnp.zeros(num_rows, jnp.int32)
    number, best_S, where_S = lax.while_loop(is_open, look, (jnp.int32(0), *nothing))
    left_S = lax.dynamic_index_in_dim(bound_SK, number, 1, keepdims=False)
    return where_S, (left_S < best_S) | ~active


def block_bounds(x: Array, bounds: LogitBounds) -> Array:
    """For each block of tokens, what none of its logits exceeds.

    Args:
        x: float32 [S, E].
        bounds: of a weight [V, E].

    Returns:
        float32 [S, N], N the vocabulary's blocks and perhaps a few more, which are far below.
    """
    num_rows, num_inputs = x.shape
    table = bounds.table
    near = rounded(x)
    length = jnp.linalg.norm(x, axis=1, keepdims=True)
    # What a float32 sum of E products may lose, here and in the logits that bounds are held to.
    lost = np.float32(num_inputs * 2.0**-22)
    error = jnp.linalg.norm(x - near, axis=1, keepdims=True) + lost * length
    width = table.shape[1] - num_inputs
    rest = jnp.pad(jnp.concatenate([length, error], axis=1) * LIFT, ((0, 0), (0, width - 2)))
    rows = jnp.concatenate([near, rest], axis=1).astype(jnp.bfloat16)
    rows = lax.optimization_barrier(rows)
    per_chunk = CHUNK // BLOCK

    def add(index: Array, found: Array) -> Array:
        # So few tokens at once that their logits stay in a core's cache until they are reduced.
        part = lax.dynamic_slice_in_dim(table, index * CHUNK, CHUNK)
        logits = lax.dot_general(
            rows, part, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        largest = logits.reshape(num_rows, per_chunk, BLOCK).max(axis=-1)
        return lax.dynamic_update_slice_in_dim(found, largest, index * per_chunk, 1)

    num_blocks = len(table) // BLOCK
    return lax.fori_loop(
        0, len(table) // CHUNK, add, jnp.zeros((num_rows, num_blocks), jnp.float32)
    )


def rounded(x: Array) -> Array:
    """float32 numbers that bfloat16 holds, the nearest. A conversion there and back would do, if
    compilers did not take it for nothing."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
