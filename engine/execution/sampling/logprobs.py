"""Log-probabilities of tokens, chosen or given.

They are of the *raw* logits: before temperature, penalties, biases and masks, so that they say what
the model thought and not what the request's parameters made of it.
Shapes: T tokens (rows of logits), V the vocabulary, N the alternatives reported.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from octavo.engine.execution.sampling.topk import argmax, blocked, sum_pair, top_k

MAX_LOGPROBS = 20
"""Alternatives computed for a token, however few its request asked for: shapes are static."""


class TokenScores(NamedTuple):
    """How likely tokens were.

    Attributes:
        logprob: f32 `[T]`, natural logarithm.
        rank: i32 `[T]`, 1 + the number of tokens with a greater logit.
        top_ids: i32 `[T, N]`, the most likely tokens, lower ids first among equals.
        top_logprobs: f32 `[T, N]`, theirs.
    """

    logprob: Array
    rank: Array
    top_ids: Array
    top_logprobs: Array


@jax.named_scope("score_tokens")
def score_tokens(logits_TV: Array, tokens_T: Array, num_top: int = MAX_LOGPROBS) -> TokenScores:
    """Scores of one token a row, against all others.

    Args:
        logits_TV: f32, raw.
        tokens_T: i32, the tokens to score, in [0, V).
        num_top: static, the alternatives to report; at most V.

    Returns:
        The scores.

    Raises:
        ValueError: `num_top` exceeds V.
    """
    logit_T = jnp.take_along_axis(logits_TV, tokens_T[:, None], axis=1)[:, 0]
    max_T = argmax(logits_TV)[1]
    # A row of -inf alone has no distribution: its scores come out as NaN, not as an error.
    blocks_TNB = blocked(logits_TV, -jnp.inf)
    mass_TN, greater_TN = sum_pair(
        jnp.exp(blocks_TNB - max_T[:, None, None]),
        (blocks_TNB > logit_T[:, None, None]).astype(jnp.int32),
    )
    normalizer_T = max_T + jnp.log(mass_TN.sum(axis=-1))
    top_TN, top_ids_TN = top_k(logits_TV, num_top)
    return TokenScores(
        logprob=logit_T - normalizer_T,
        rank=1 + greater_TN.sum(axis=-1),
        top_ids=top_ids_TN,
        top_logprobs=top_TN - normalizer_T[:, None],
    )


def no_scores(num_rows: int, num_top: int = MAX_LOGPROBS) -> TokenScores:
    """Zeros in the shape of `score_tokens`' result, for steps in which nobody asks."""
    return TokenScores(
        logprob=jnp.zeros((num_rows,), jnp.float32),
        rank=jnp.zeros((num_rows,), jnp.int32),
        top_ids=jnp.zeros((num_rows, num_top), jnp.int32),
        top_logprobs=jnp.zeros((num_rows, num_top), jnp.float32),
    )
