"""Log-probabilities and ranks, against f64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.execution.sampling.logprobs import no_scores, score_tokens


@pytest.mark.parametrize("vocab_size", [25, 1000, 4099])
def test_scores_are_those_of_a_sorted_log_softmax(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = (rng.normal(size=(9, vocab_size)) * 4).astype(np.float32)
    logits[1] = np.round(logits[1])
    logits[2, rng.integers(0, vocab_size, vocab_size // 4)] = -np.inf
    logits[3] += 1e4
    tokens = rng.integers(0, vocab_size, 9).astype(np.int32)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        scores = jax.jit(score_tokens)(jnp.asarray(logits), jnp.asarray(tokens))
    exact = logits.astype(np.float64)
    exact = exact - exact.max(axis=-1, keepdims=True)
    exact = exact - np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    every = np.arange(9)
    # An f32 logit near 1e4 is itself known to 1e-3 only.
    tolerance = np.where(every == 3, 2e-3, 2e-5)
    close = np.abs(np.asarray(scores.logprob) - exact[every, tokens]) <= tolerance
    assert (close | np.isneginf(exact[every, tokens])).all()
    chosen = logits[every, tokens][:, None]
    np.testing.assert_array_equal(np.asarray(scores.rank), 1 + (logits > chosen).sum(axis=-1))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :20]
    finite = np.isfinite(np.take_along_axis(logits, order, axis=-1))
    np.testing.assert_array_equal(np.asarray(scores.top_ids)[finite], order[finite])
    top = np.take_along_axis(exact, order, axis=-1)
    difference = np.abs(np.asarray(scores.top_logprobs) - np.where(finite, top, 0.0))
    assert (difference <= tolerance[:, None])[finite].all()


def test_a_forbidden_token_has_no_probability_and_the_last_rank():
    logits = np.zeros((1, 30), np.float32)
    logits[0, 7] = -np.inf
    scores = score_tokens(jnp.asarray(logits), jnp.asarray([7], jnp.int32), 5)
    assert float(scores.logprob[0]) == -np.inf
    assert int(scores.rank[0]) == 30
    assert np.asarray(scores.top_ids).tolist() == [[0, 1, 2, 3, 4]]


def test_no_scores_have_the_shapes_and_types_of_scores():
    scores = jax.eval_shape(score_tokens, jnp.zeros((3, 50)), jnp.zeros(3, jnp.int32))
    for real, empty in zip(scores, no_scores(3), strict=True):
        assert (real.shape, real.dtype) == (empty.shape, empty.dtype)


def test_more_alternatives_than_tokens_are_refused():
    with pytest.raises(ValueError, match="k = 20"):
        score_tokens(jnp.zeros((1, 10)), jnp.zeros(1, jnp.int32))
