"""One float32 row by one expert of a stack, as a native function that XLA compiles.

A step of one row reads each chosen expert's weights once, so it takes as long as reading takes.
The expert is a coordinate of the weight here: sliced out of the stack first, it would be copied.

As in `block_quantized_linear`, the call says that it is small and not to be inlined, so that one
function comes of all its loops. Inputs are taken `INPUTS` at a time, and added up for all outputs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.compat import as_one_function

INPUTS = 16
"""Inputs whose products are added in turn; a weight's inputs are a multiple of them."""


def row_by_expert(x: jax.Array, weight: jax.Array, expert: jax.Array) -> jax.Array:
    """x · weight[expert], read from the stack.

    Args:
        x: float32 [K].
        weight: float32 [X, K, N], K a multiple of `INPUTS`.
        expert: int32, 0 to X - 1.

    Returns:
        float32 [N].
    """
    # What the row is made of is not to be made again for each output.
    x = jax.lax.optimization_barrier(x)
    with as_one_function():
        return _row_by_expert(x, weight, expert.astype(jnp.uint32))


@jax.jit
def _row_by_expert(x: jax.Array, weight: jax.Array, expert: jax.Array) -> jax.Array:
    """float32 [N] of x [K] and the expert's [K, N] of a stack [X, K, N]."""
    _, num_inputs, num_outputs = weight.shape
    # Unsigned, so that no index is looked at for being negative.
    zero = np.uint32(0)

    def add(part: jax.Array, out: jax.Array) -> jax.Array:
        first = part * np.uint32(INPUTS)
        inputs = jax.lax.dynamic_slice(x, (first,), (INPUTS,))
        for i in range(INPUTS):
            at = (expert, first + np.uint32(i), zero)
            row = jax.lax.dynamic_slice(weight, at, (1, 1, num_outputs)).reshape(num_outputs)
            out = out + inputs[i] * row
        return out

    parts = jnp.uint32(num_inputs // INPUTS)
    return jax.lax.fori_loop(jnp.uint32(0), parts, add, jnp.zeros((num_outputs,), jnp.float32))
