"""Largest entries of long rows, without sorting them.

Rows are a vocabulary wide (tens or hundreds of thousands). Cutting them into blocks and looking at
the blocks' maxima first finds the same entries as a sort would, in about one pass over memory.
Shapes: S rows, V entries a row, B entries a block, N blocks a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

BLOCK = 128
"""Entries a block: a lane tile of a TPU, a few vectors of a CPU."""
FINE_BLOCK = 8
"""Entries a block of what is left of a row. A GPU sorts to select: some thousand entries take one
kernel. Sorts of more than 8,192 in more than 52 rows are a call of XLA's (0.11) that no graph
holds, so that the loops around it are the host's."""


def blocked(x_SV: Array, fill: float | int, block: int = BLOCK) -> Array:
    """`[S, V]` cut into blocks `[S, N, block]`; a last, partial block is completed with `fill`."""
    num_rows, width = x_SV.shape
    missing = -width % block
    if missing:
        x_SV = jnp.pad(x_SV, ((0, 0), (0, missing)), constant_values=fill)
    return x_SV.reshape(num_rows, -1, block)


def pick_block(x_SNB: Array, block_S: Array) -> Array:
    """Row s's block number `block_S[s]`: `[S, N, B] -> [S, B]`."""
    return jnp.take_along_axis(x_SNB, block_S[:, None, None], axis=1)[:, 0]


def sum_pair(x: Array, y: Array) -> tuple[Array, Array]:
    """Sums of both along the last axis, in one pass that computes their entries as it goes.

    Reduced one by one, XLA's CPU compiler would write each operand to memory first.
    """

    def add(total: tuple[Array, Array], entry: tuple[Array, Array]) -> tuple[Array, Array]:
        return total[0] + entry[0], total[1] + entry[1]

    zeros = (jnp.zeros((), x.dtype), jnp.zeros((), y.dtype))
    sums: tuple[Array, Array] = lax.reduce((x, y), zeros, add, (x.ndim - 1,))
    return sums


@jax.named_scope("argmax")
def argmax(x_SV: Array) -> tuple[Array, Array]:
    """Position of each row's largest entry, the lowest one among equals, as `numpy.argmax`.

    Args:
        x_SV: f32, no NaN.

    Returns:
        Positions i32 `[S]` and the entries themselves f32 `[S]`.
    """
    x_SNB = blocked(x_SV, -jnp.inf)
    block_max_SN = x_SNB.max(axis=-1)
    top_S = block_max_SN.max(axis=-1)
    block_S = _first_equal(block_max_SN, top_S)
    inside_S = _first_equal(pick_block(x_SNB, block_S), top_S)
    return jnp.minimum(block_S * BLOCK + inside_S, x_SV.shape[1] - 1), top_S


@jax.named_scope("top_k")
def top_k(x_SV: Array, k: int) -> tuple[Array, Array]:
    """The `k` largest entries of each row, in descending order, lower positions first among equals.

    At most `k` blocks hold them, and those are the blocks with the `k` largest maxima; kept in
    their order, they decide between equal entries as the whole row would.

    Args:
        x_SV: f32 (the element type that has a fast selection on every platform), no NaN; -0.0 is
            less than 0.0 here.
        k: static, 1 ≤ k ≤ V.

    Returns:
        Entries f32 `[S, k]` and their positions i32 `[S, k]`.

    Raises:
        ValueError: `k` exceeds V.
    """
    width = x_SV.shape[1]
    if not 1 <= k <= width:
        raise ValueError(f"k = {k}: from 1 to the row's {width} entries")
    return _narrowed(x_SV, k, (BLOCK, FINE_BLOCK))


def _narrowed(x_SV: Array, k: int, blocks: tuple[int, ...]) -> tuple[Array, Array]:
    """`top_k`, by blocks of these sizes in turn where the row is long enough to gain by it."""
    num_rows, width = x_SV.shape
    fitting = tuple(block for block in blocks if width > 2 * k * block)
    if not fitting:
        return _select(x_SV, k)
    size, *finer = fitting
    x_SNB = blocked(x_SV, -jnp.inf, size)
    blocks_Sk = jnp.sort(_select(x_SNB.max(axis=-1), k)[1], axis=-1)
    chosen = jnp.take_along_axis(x_SNB, blocks_Sk[:, :, None], axis=1)
    values, where = _narrowed(chosen.reshape(num_rows, k * size), k, tuple(finer))
    block = jnp.take_along_axis(blocks_Sk, where // size, axis=1)
    return values, block * size + where % size


def _select(x_SV: Array, k: int) -> tuple[Array, Array]:
    # Kept together even where positions go unused: XLA's CPU compiler before 0.11 knows a selection
    # by its positions, and sorts the row without them, fifty times slower. Turned around, because
    # that compiler aborts on several devices if the barrier takes the selection as it is.
    values, positions = lax.top_k(x_SV, k)
    positions, values = lax.optimization_barrier((positions, values))
    return values, positions.astype(jnp.int32)


def _first_equal(x_SN: Array, value_S: Array) -> Array:
    """Lowest position in each row that holds its value; the last position if none does."""
    position_SN = lax.broadcasted_iota(jnp.int32, x_SN.shape, 1)
    last = x_SN.shape[1] - 1
    return jnp.where(x_SN == value_S[:, None], position_SN, last).min(axis=-1)
