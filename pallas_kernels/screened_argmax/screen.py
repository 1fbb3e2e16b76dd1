"""What of an output layer says which tokens are worth a look."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 16
"""Tokens that are looked at together, or not at all."""
CHUNK = 1024
"""Tokens whose bounds are computed together."""
LIFT = np.float32(1 + 2.0**-7)
"""Norms are multiplied by it before they are rounded to bfloat16, which takes 2^-8 at the most."""
_NEVER = -1e30
_ALIGNMENT = 32
"""A row of a matrix unit's tile, in bfloat16."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """An output layer, rounded.

    Attributes:
        table: bfloat16 [V', E']: each token's weights, what rounding took of their length, their
            length, and zeros. V' and E' are multiples of `CHUNK` and of a matrix unit's rows;
            bounds of tokens beyond the vocabulary are below all others.
    """

    table: jax.Array


def make_screen(weight: jax.Array) -> Screen:
    """The screen of an output layer.

    Args:
        weight: float32 [V, E].
    """
    vocab_size, num_inputs = weight.shape
    missing = -vocab_size % CHUNK
    padded = jnp.pad(weight, ((0, missing), (0, 0))) if missing else weight
    width = -(-(num_inputs + 2) // _ALIGNMENT) * _ALIGNMENT

    def one(rows: jax.Array) -> jax.Array:
        near = rounded(rows)
        norms = [jnp.linalg.norm(each, axis=1) for each in (rows - near, near)]
        rest = jnp.pad(jnp.stack(norms, axis=1) * LIFT, ((0, 0), (0, width - num_inputs - 2)))
        return jnp.concatenate([near, rest], axis=1).astype(jnp.bfloat16)

    table = lax.map(one, padded.reshape(-1, CHUNK, num_inputs)).reshape(-1, width)
    return Screen(table=table.at[vocab_size:, num_inputs].set(_NEVER))


def rounded(x: jax.Array) -> jax.Array:
    """float32 numbers that bfloat16 holds, the nearest. A conversion there and back would do, if
    compilers did not take it for nothing."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
