"""The bounded argmax: bounds hold, tokens are those of all logits, and doubt is told."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.pallas_kernels.cpu.bounded_argmax import (
    BLOCK,
    argmax_reference,
    block_bounds,
    bounded_argmax,
    make_logit_bounds,
)

VOCABULARIES = [1024, 3000, 40, 7]
"""Whole chunks, a partial one, a few blocks, and less than one."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def find(
    x: np.ndarray, weight: np.ndarray, active: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    rows = np.ones(len(x), bool) if active is None else active
    bounds = jax.jit(make_logit_bounds)(jnp.asarray(weight))
    found = jax.jit(bounded_argmax)(jnp.asarray(x), jnp.asarray(weight), bounds, jnp.asarray(rows))
    return np.asarray(found[0]), np.asarray(found[1])


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_no_logit_exceeds_its_blocks_bound(vocab_size: int, spread: float) -> None:
    """Against products in float64; with a spread, some inputs are hundreds of times as large."""
    x = normal(6, 72) * np.exp(spread * normal(1, 72, seed=1))
    weight = normal(vocab_size, 72, seed=2) * np.exp(spread * normal(vocab_size, 1, seed=3))
    bounds = jax.jit(make_logit_bounds)(jnp.asarray(weight))
    found = np.asarray(jax.jit(block_bounds)(jnp.asarray(x), bounds), np.float64)
    logits = x.astype(np.float64) @ weight.T.astype(np.float64)
    missing = found.shape[1] * BLOCK - vocab_size
    largest = np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf)
    largest = largest.reshape(len(x), -1, BLOCK).max(axis=2)
    assert (found >= largest).all()
    in_use = np.isfinite(largest)
    # And they are near: within a hundredth of the two lengths' product.
    lengths = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=1).max()
    assert (np.where(in_use, found - largest, 0) <= 0.01 * lengths).all()
    assert (found[~in_use] < -1e6).all()


def test_bounds_hold_where_every_rounding_goes_the_wrong_way() -> None:
    """Numbers just below those between two that bfloat16 holds, all of one sign."""
    worst = np.float32(1 + 2.0**-8 + 2.0**-20)
    x, weight = np.full((1, 512), worst), np.full((32, 512), worst)
    weight[5] *= np.float32(1 - 2.0**-12)
    bounds = jax.jit(make_logit_bounds)(jnp.asarray(weight))
    found = np.asarray(jax.jit(block_bounds)(jnp.asarray(x), bounds), np.float64)
    logits = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert (found[0, :2] >= logits.reshape(2, BLOCK).max(axis=1)).all()


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_the_token_is_the_references(vocab_size: int, num_rows: int) -> None:
    x, weight = normal(num_rows, 64), normal(vocab_size, 64, seed=1)
    tokens, certain = find(x, weight)
    assert certain.all()
    assert tokens.tolist() == np.asarray(argmax_reference(x, weight)).tolist()


def test_among_equals_it_is_the_lowest() -> None:
    x, weight = normal(4, 64), normal(2000, 64, seed=1)
    best = np.asarray(argmax_reference(x, weight))
    copies = np.arange(1900, 1904)
    weight[copies] = weight[best]
    weight[300] = weight[best[2]]
    tokens, certain = find(x, weight)
    assert certain.all()
    assert tokens.tolist() == [*best[:2], min(best[2], 300), best[3]]


def test_of_logits_below_zero_it_is_a_token_of_the_vocabulary() -> None:
    """Bounds of tokens that there are not are lower still."""
    weight = np.abs(normal(1030, 64, seed=1))
    tokens, certain = find(-np.abs(normal(5, 64)), weight)
    assert certain.all()
    assert (tokens == np.asarray(argmax_reference(-np.abs(normal(5, 64)), weight))).all()


def test_too_many_tokens_alike_are_in_doubt() -> None:
    x, weight = normal(3, 64), normal(4000, 64, seed=1)
    # Sixty tokens in as many blocks differ by less than bfloat16 can tell.
    weight[::64] = 9 * x[1] / np.linalg.norm(x[1]) * (1 + 1e-5 * normal(63, 1, seed=2))
    tokens, certain = find(x, weight)
    assert certain.tolist() == [True, False, True]
    best = np.asarray(argmax_reference(x, weight))
    assert (tokens == best)[certain].all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_rows_without_a_largest_logit_are_in_doubt_and_disturb_no_other(bad: float) -> None:
    x, weight = normal(3, 64), normal(2000, 64, seed=1)
    want = np.asarray(argmax_reference(x, weight))
    x[1] = bad
    tokens, certain = find(x, weight)
    assert certain.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == want[[0, 2]].tolist()


def test_inactive_rows_are_certain_whatever_they_hold() -> None:
    x, weight = normal(3, 64), normal(2000, 64, seed=1)
    want = np.asarray(argmax_reference(x, weight))
    x[1] = np.nan
    tokens, certain = find(x, weight, np.array([True, False, True]))
    assert certain.all()
    assert tokens[[0, 2]].tolist() == want[[0, 2]].tolist()


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_very_small_and_very_large_numbers_are_right_or_in_doubt(scale: float) -> None:
    x, weight = normal(8, 64) * np.float32(scale), normal(2000, 64, seed=1) * np.float32(scale)
    tokens, certain = find(x, weight)
    assert (tokens == np.asarray(argmax_reference(x, weight)))[certain].all()
    assert certain.all() or scale > 1
