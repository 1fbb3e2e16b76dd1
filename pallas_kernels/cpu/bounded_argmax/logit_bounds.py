"""What of an output layer bounds its logits: its weights, rounded, and what rounding took."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from octavo.pallas_kernels.cpu.bounded_argmax.kernel import CHUNK, LIFT, bounded_argmax, rounded

_NEVER = -1e30
_ALIGNMENT = 32
"""A row of a matrix unit's tile, in bfloat16."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBounds:
    """An output layer, rounded.

    Attributes:
        table: bfloat16 [V', E']: each token's weights, what rounding took of their length, their
            length, and zeros. V' and E' are multiples of `CHUNK` and of a matrix unit's rows;
            bounds of tokens beyond the vocabulary are below all others.
    """

    table: jax.Array

    def argmax(
        self, x: jax.Array, weight: jax.Array, active: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`bounded_argmax` by these bounds."""
        return bounded_argmax(x, weight, self, active)


def make_logit_bounds(weight: jax.Array) -> LogitBounds:
    """The bounds of an output layer's logits.

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
    return LogitBounds(table=table.at[vocab_size:, num_inputs].set(_NEVER))
