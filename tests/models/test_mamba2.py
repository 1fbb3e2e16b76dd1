"""The products of a chunk against a state space that visits one token after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models.blocks.mamba2 import CHUNK, space_chunk, space_token

GROUPS, HEADS, STATE, SIZE = 2, 3, 6, 4
TOLERANCE = 2e-5
"""Of sums of float32 in another order, of numbers of about one."""


def by_definition(inputs: Any, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In float64, one head at a time."""
    c, b, x, decay = (np.asarray(each, np.float64) for each in inputs)
    state, out = np.array(state, np.float64), np.zeros(x.shape)
    for token in range(len(c)):
        for group in range(GROUPS):
            for head in range(HEADS):
                s = state[group, head] * np.exp(decay[token, group, head])
                s = s + np.outer(b[token, group], x[token, group, head])
                state[group, head] = s
                out[token, group, head] = c[token, group] @ s
    return out, state


def inputs_of(seed: int, decay: float) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    c = rng.standard_normal((CHUNK, GROUPS, STATE)) / STATE
    b = rng.standard_normal((CHUNK, GROUPS, STATE)) / STATE
    x = rng.standard_normal((CHUNK, GROUPS, HEADS, SIZE))
    decays = -decay * rng.random((CHUNK, GROUPS, HEADS)) ** 4
    return tuple(np.asarray(each, np.float32) for each in (c, b, x, decays))


def a_state(seed: int = 9) -> np.ndarray:
    shape = (GROUPS, HEADS, STATE, SIZE)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 17, CHUNK])
@pytest.mark.parametrize("decay", [0.0, 1.0, 60.0])
def test_a_chunk_computes_what_its_tokens_do(count, decay):
    inputs, state = inputs_of(count, decay), a_state()
    expected, after = by_definition([each[:count] for each in inputs], state)
    counts = jnp.arange(CHUNK) < count
    out, found = jax.jit(space_chunk)(tuple(map(jnp.asarray, inputs)), counts, jnp.asarray(state))
    np.testing.assert_allclose(out[:count], expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found, after, rtol=0, atol=TOLERANCE)


def test_a_token_of_each_row_computes_its_definition():
    inputs = inputs_of(3, 1.0)
    states = np.stack([a_state(seed) for seed in range(5)])
    out, found = space_token(tuple(jnp.asarray(each[:5]) for each in inputs), jnp.asarray(states))
    for row in range(5):
        expected, after = by_definition([each[row : row + 1] for each in inputs], states[row])
        np.testing.assert_allclose(out[row], expected[0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(found[row], after, rtol=0, atol=TOLERANCE)
