"""Packed weights in a program of several layers: the memory that their dense forms take."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.packed_linear import abstract_packed
from octavo.pallas_kernels.stored_blocks import BlockType

SIZE, LAYERS, STEPS = 512, 6, 4


@pytest.mark.parametrize("in_loop", [False, True], ids=["once", "in a loop"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_holds_the_dense_weights_of_one_layer_at_a_time(
    dtype: str, in_loop: bool
) -> None:
    float16 = np.dtype(np.float16)
    kind = BlockType(codes=32, nibbles=True, scale_dtype=float16, minimum_dtype=float16)
    weight = abstract_packed(kind, (SIZE,), (SIZE,), jnp.dtype(dtype))

    def layers(x: jax.Array, weights: list) -> jax.Array:
        for each in weights:
            x = jnp.tanh(each.apply(x))
        return x

    def steps(x: jax.Array, weights: list) -> jax.Array:
        if not in_loop:
            return layers(x, weights)
        return jax.lax.fori_loop(0, STEPS, lambda _, x: layers(x, weights), x)

    x = jax.ShapeDtypeStruct((8, SIZE), jnp.dtype(dtype))
    compiled = jax.jit(steps).lower(x, [weight] * LAYERS).compile()
    dense = SIZE * SIZE * jnp.dtype(dtype).itemsize
    assert dense <= compiled.memory_analysis().temp_size_in_bytes < 2 * dense
