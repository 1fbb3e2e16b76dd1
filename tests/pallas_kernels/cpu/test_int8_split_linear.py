"""Int8-split linear layers: digits say the numbers, and products are as near as float32's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.cpu.int8_split_linear import (
    BASE,
    MAX_INPUTS,
    Int8SplitWeight,
    digits,
    int8_split_linear,
    int8_split_linear_reference,
    split_weight,
    whole,
)

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "flat": ((96,), (64,)),
    "fused": ((64,), (2, 48)),
    "heads in": ((3, 2, 16), (40,)),
    "sizes that fill no vector": ((37,), (5, 7)),
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def product(x: Any, weight: Int8SplitWeight) -> np.ndarray:
    return np.asarray(jax.jit(int8_split_linear)(jnp.asarray(x), weight))


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_digits_say_numbers_to_24_bits_of_the_largest_of_their_row(scale: float) -> None:
    rows = normal(5, 96) * np.float32(scale)
    rows[2] = 0
    rows[3, 7] *= 1000
    (high, middle, low), factor = jax.jit(digits)(rows)
    said = (np.float64(high) + (np.float64(middle) + np.float64(low) / BASE) / BASE) * factor
    # Half a unit of the last digit, and what float32's division rounds off before the cut.
    allowed = np.abs(rows).max(1, keepdims=True) * (2.0**-24 + 2.0**-24)
    assert (np.abs(said - rows) <= allowed).all()
    assert max(np.abs(np.int32(digit)).max() for digit in (high, middle, low)) <= 127


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_the_product_is_the_references(shape: str, rows: int) -> None:
    inputs, outputs = SHAPES[shape]
    plain = normal(*inputs, *outputs)
    weight = split_weight(jnp.asarray(plain), len(inputs))
    x = normal(rows, *inputs, seed=1)
    got, want = product(x, weight), np.asarray(int8_split_linear_reference(jnp.asarray(x), weight))
    assert got.shape == (rows, *outputs)
    assert got.dtype == np.float32
    matrix = plain.reshape(np.prod(inputs), -1)
    # The cut, the division before it, and what `whole` rounds: half a unit of 2^-23 each.
    allowed = np.abs(matrix).max(0) * (3 * 2.0**-24)
    said = np.asarray(whole(weight)).reshape(-1, len(matrix)).T
    assert (np.abs(said - matrix) <= allowed).all()
    magnitude = np.abs(x.reshape(rows, -1)) @ np.abs(matrix)
    assert (np.abs(got - want) <= magnitude.reshape(got.shape) * 2.0**-20).all()


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_errors_are_a_few_times_those_of_a_product_in_float32(spread: float) -> None:
    """Against sums in float64; with a spread, some inputs are a thousand times as large as others,
    as a model's are."""
    x = normal(64, 576) * np.exp(spread * normal(1, 576, seed=2))
    plain = normal(576, 192, seed=3)
    exact = x.astype(np.float64) @ plain.astype(np.float64)
    float32 = np.asarray(jnp.matmul(x, plain, precision="highest"))
    sliced = product(x, split_weight(jnp.asarray(plain), 1))

    def error(found: np.ndarray) -> float:
        return float(np.sqrt(np.mean((found - exact) ** 2)))

    assert error(sliced) <= 6 * error(float32)
    assert error(sliced) <= 3e-6 * float(np.sqrt(np.mean(exact**2)))


def test_the_longest_sum_of_digits_fits() -> None:
    """Every digit at its largest, all of one sign: the worst there is."""
    x = np.full((1, MAX_INPUTS), 127 + 127 / BASE + 127 / BASE**2, np.float32)
    weight = Int8SplitWeight(
        high=jnp.full((1, MAX_INPUTS), 127, jnp.int8),
        middle=jnp.full((1, MAX_INPUTS), 127, jnp.int8),
        low=jnp.full((1, MAX_INPUTS), 127, jnp.int8),
        scale=jnp.ones(1),
        outputs=(1,),
    )
    np.testing.assert_allclose(product(x, weight)[0, 0], x[0, 0] ** 2 * MAX_INPUTS, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_that_is_not_finite_stays_so_and_others_do_not_know(bad: float) -> None:
    x = normal(4, 64)
    weight = split_weight(jnp.asarray(normal(64, 32, seed=1)), 1)
    good = product(x, weight)
    x[2, 5] = bad
    got = product(x, weight)
    assert not np.isfinite(got[2]).any()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(good, 2, 0))


def test_activations_that_do_not_fit_are_refused() -> None:
    weight = split_weight(jnp.ones((64, 16)), 1)
    for x in (jnp.ones((1, 32)), jnp.ones((1, 64), jnp.bfloat16)):
        with pytest.raises(ValueError, match=r"want float32 \[T, 64\]"):
            int8_split_linear(x, weight)
