"""The products of a chunk against a delta rule that visits one token after the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models.blocks.gated_delta import CHUNK, delta_chunk, delta_token

HEADS, GROUP, KEY, VALUE = 2, 3, 8, 4
TOLERANCE = 2e-5
"""Of sums of float32 in another order, of numbers of about one."""


def by_definition(inputs: Any, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In float64, one head at a time."""
    q, k, v, decay, beta = (np.asarray(each, np.float64) for each in inputs)
    state, out = np.array(state, np.float64), np.zeros(v.shape)
    for token in range(len(q)):
        for head in range(HEADS):
            for value in range(GROUP):
                s = state[head, value] * np.exp(decay[token, head, value])
                wrong = v[token, head, value] - k[token, head] @ s
                s = s + np.outer(k[token, head], beta[token, head, value] * wrong)
                state[head, value] = s
                out[token, head, value] = q[token, head] @ s
    return out, state


def inputs_of(seed: int, *, repeats: bool = False, decay: float = 1.0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)

    def unit(x: np.ndarray) -> np.ndarray:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    k = unit(rng.standard_normal((CHUNK, HEADS, KEY)))
    if repeats:
        k[:] = k[0]
    q = unit(rng.standard_normal((CHUNK, HEADS, KEY)))
    v = rng.standard_normal((CHUNK, HEADS, GROUP, VALUE))
    decays = -decay * rng.random((CHUNK, HEADS, GROUP)) ** 4
    beta = np.ones_like(decays) if repeats else rng.random(decays.shape)
    return tuple(np.asarray(each, np.float32) for each in (q, k, v, decays, beta))


def a_state(seed: int = 9) -> np.ndarray:
    shape = (HEADS, GROUP, KEY, VALUE)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 17, CHUNK])
@pytest.mark.parametrize("decay", [0.0, 1.0, 60.0])
@pytest.mark.parametrize("repeats", [False, True])
def test_a_chunk_computes_what_its_tokens_do(count, decay, repeats):
    inputs, state = inputs_of(count, repeats=repeats, decay=decay), a_state()
    expected, after = by_definition([each[:count] for each in inputs], state)
    counts = jnp.arange(CHUNK) < count
    out, found = jax.jit(delta_chunk)(tuple(map(jnp.asarray, inputs)), counts, jnp.asarray(state))
    np.testing.assert_allclose(out[:count], expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(found, after, rtol=0, atol=TOLERANCE)


def test_a_token_of_each_row_computes_its_definition():
    inputs = inputs_of(3)
    states = np.stack([a_state(seed) for seed in range(5)])
    out, found = delta_token(tuple(jnp.asarray(each[:5]) for each in inputs), jnp.asarray(states))
    for row in range(5):
        expected, after = by_definition([each[row : row + 1] for each in inputs], states[row])
        np.testing.assert_allclose(out[row], expected[0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(found[row], after, rtol=0, atol=TOLERANCE)
