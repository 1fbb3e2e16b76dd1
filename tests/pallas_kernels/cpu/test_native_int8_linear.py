"""Native int8 products are exact, and give the numbers of the library's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.cpu.native_int8_linear import (
    COMPILER_OPTIONS,
    NativeInt8Weight,
    native_product,
)
from octavo.pallas_kernels.quantized_linear import (
    QuantizedWeight,
    quantize_weight,
    quantized_linear,
)

SHAPES = {"flat": ((96,), (64,)), "fused": ((96,), (2, 48)), "heads in": ((3, 2, 16), (40,))}


def case(shape: str, rows: int) -> tuple[jax.Array, QuantizedWeight]:
    inputs, outputs = SHAPES[shape]
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, *inputs)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((*inputs, *outputs)), jnp.float32)
    return x, quantize_weight(weight, "int8", len(inputs))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("num_inputs", [32, 64, 96, 2048, 4096 + 96])
def test_native_products_are_exact(num_inputs: int, rows: int) -> None:
    rng = np.random.default_rng(num_inputs)
    x = rng.integers(-127, 128, (rows, num_inputs), dtype=np.int8)
    weight = rng.integers(-127, 128, (37, num_inputs), dtype=np.int8)
    # What 16 bits have least room for: sums of two products of the largest, and of the smallest.
    x[0], weight[0], weight[1] = 127, 127, -127
    got = jax.jit(native_product)(x, weight)
    np.testing.assert_array_equal(got, x.astype(np.int64) @ weight.astype(np.int64).T)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2])
def test_native_weights_give_the_same_numbers(shape: str, rows: int) -> None:
    x, weight = case(shape, rows)
    native = NativeInt8Weight(weight=weight)
    lowered = jax.jit(NativeInt8Weight.apply).lower(native, x)
    assert "_output_by_output" in lowered.as_text()
    np.testing.assert_array_equal(
        lowered.compile(COMPILER_OPTIONS)(native, x), jax.jit(quantized_linear)(x, weight)
    )


def test_inputs_that_native_products_cannot_take_are_left_to_the_library() -> None:
    rng = np.random.default_rng(0)
    x, matrix = rng.standard_normal((1, 40), np.float32), rng.standard_normal((40, 8), np.float32)
    weight = quantize_weight(jnp.asarray(matrix), "int8", 1)
    native = NativeInt8Weight(weight=weight)
    lowered = jax.jit(NativeInt8Weight.apply).lower(native, jnp.asarray(x))
    assert "_output_by_output" not in lowered.as_text()
    np.testing.assert_array_equal(native.apply(x), quantized_linear(x, weight))


def test_rows_that_do_not_fit_are_refused() -> None:
    x, weight = case("heads in", 2)
    with pytest.raises(ValueError, match=r"want \[T, 3, 2, 16\]"):
        NativeInt8Weight(weight=weight).apply(x.reshape(2, -1))
