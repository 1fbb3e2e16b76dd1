"""Eight-bit linear layers: how weights are rounded, and that every way to multiply agrees."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.quantized_linear import (
    QUANTIZATIONS,
    Formulation,
    QuantizedWeight,
    formulations,
    quantize,
    quantize_weight,
    quantized_linear,
    quantized_linear_reference,
)
from octavo.pallas_kernels.quantized_linear.product import _product

STEP = {"int8": 0.5 / 127, "fp8": 2.0**-4}
"""Half the distance between neighbours: of a slice's largest in int8, of the value itself in fp8
(3 bits of mantissa)."""
SHAPES = {"flat": ((96,), (64,)), "fused": ((96,), (2, 48)), "heads in": ((3, 2, 16), (40,))}


def case(shape: str, quantization: str, rows: int) -> tuple[jax.Array, jax.Array, QuantizedWeight]:
    inputs, outputs = SHAPES[shape]
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.standard_normal((rows, *inputs)), jnp.float32)
    weight = jnp.asarray(rng.standard_normal((*inputs, *outputs)), jnp.float32)
    return x, weight, quantize_weight(weight, quantization, len(inputs))  # type: ignore[arg-type]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_off_by_half_a_step_at_most(shape: str, quantization: str) -> None:
    _, weight, quantized = case(shape, quantization, 1)
    num_inputs = len(SHAPES[shape][0])
    exact = np.moveaxis(weight, range(num_inputs), range(-num_inputs, 0))
    inputs = tuple(range(exact.ndim - num_inputs, exact.ndim))
    largest = np.abs(exact).max(axis=inputs, keepdims=True)
    error = np.abs(np.asarray(quantized.dequantized()) - exact)
    # An fp8 number below 2^-6 of 448 is subnormal: its neighbours are 2^-9 apart.
    bound = STEP[quantization] * (largest if quantization == "int8" else np.abs(exact))
    floor = 2.0**-10 / 448 * largest if quantization == "fp8" else 0
    assert (error <= np.maximum(bound, floor) * (1 + 1e-5)).all()
    assert quantized.values.dtype.itemsize == 1
    assert quantized.scale.shape == SHAPES[shape][1]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 33, 65])
def test_the_product_is_the_references(shape: str, quantization: str, rows: int) -> None:
    x, _, weight = case(shape, quantization, rows)
    got = jax.jit(quantized_linear)(x, weight)
    # The reference adds rounded float32 products in another order: 96 of them, of size 1.
    np.testing.assert_allclose(got, quantized_linear_reference(x, weight), rtol=2e-5, atol=2e-4)
    assert got.dtype == x.dtype


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("weight_first_rows", [0, 3])
@pytest.mark.parametrize("min_rows", [1, 4])
def test_every_formulation_gives_the_same_product(
    quantization: str, weight_first_rows: int, min_rows: int
) -> None:
    x, _, weight = case("fused", quantization, 3)
    values, _ = quantize(x, quantization, 1)  # type: ignore[arg-type]
    how = Formulation(min_rows, weight_first_rows, widen_fp8=True)
    ones = jnp.ones(3), jnp.ones(weight.scale.shape)
    got = jax.jit(partial(_product, how))(values, ones[0], weight.values, ones[1])
    exact = np.einsum(
        "tk,abk->tab", np.asarray(values, np.float64), np.asarray(weight.values, np.float64)
    )
    if quantization == "int8":
        np.testing.assert_array_equal(got, exact)
        return
    # Sums of fp8 are float32's: of products up to 448² (200,000), one in ten million of which is
    # 0.02; two dozen such errors stay where the sum itself is near 0.
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=0.5)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_zeros_stay_zeros(quantization: str) -> None:
    x, weight, _ = case("flat", quantization, 3)
    empty = quantize_weight(weight.at[:, 5].set(0.0), quantization, 1)  # type: ignore[arg-type]
    out = np.asarray(quantized_linear(x.at[1].set(0.0), empty))
    assert np.isfinite(out).all()
    assert (out[1] == 0).all()
    assert (out[:, 5] == 0).all()


def test_the_widest_sum_of_int8_does_not_overflow() -> None:
    width = 65536
    weight = quantize_weight(jnp.ones((width, 1), jnp.float32), "int8", 1)
    out = quantized_linear(jnp.ones((2, width), jnp.float32), weight)
    np.testing.assert_allclose(out, width, rtol=1e-6)


def test_rows_of_a_table_are_its_dequantized_rows() -> None:
    _, weight, _ = case("flat", "int8", 1)
    table = quantize_weight(weight, "int8", 1, inputs_first=False)
    rows = table.rows(jnp.asarray([3, 95, 0, 400], jnp.int32))
    np.testing.assert_array_equal(rows, np.asarray(table.dequantized())[[3, 95, 0, 95]])


def test_rows_that_do_not_fit_are_refused() -> None:
    x, _, weight = case("heads in", "int8", 2)
    with pytest.raises(ValueError, match=r"want \[T, 3, 2, 16\]"):
        quantized_linear(x.reshape(2, -1), weight)


def test_the_table_of_formulations_names_a_default() -> None:
    assert {"cpu", "default"} <= set(formulations())
    with pytest.raises(ValueError, match="min_rows = 0"):
        Formulation(min_rows=0, weight_first_rows=0, widen_fp8=False)


def test_the_check_finds_products_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.pallas_kernels.quantized_linear import self_check

    assert self_check.wrong_int8_product([(96, 64), (32, 200)]) is None

    def twice(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
        return quantized_linear(x, weight) * (2 if x.shape == (128, 32) else 1)

    monkeypatch.setattr(self_check, "quantized_linear", twice)
    assert self_check.wrong_int8_product([(96, 64), (32, 200)]) == "128 x 32 x 200"
