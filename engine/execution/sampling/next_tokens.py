"""The end of a step: from hidden states to tokens, their scores, and who stops.

Legend: T tokens, S rows, E hidden, V the vocabulary, L top log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.engine.execution.platform.traits import traits_of
from octavo.engine.execution.sampling.logits import SamplingRows, count_tokens
from octavo.engine.execution.sampling.logprobs import MAX_LOGPROBS, score_tokens
from octavo.engine.execution.sampling.sampler import (
    SampleOutput,
    Variant,
    greedy_output,
    sample,
    wants_argmax,
)
from octavo.engine.execution.state import DeviceState
from octavo.engine.execution.step_spec import StepSpec
from octavo.engine.scheduler.step_plan import NO_TOKEN, NOT_FINITE, NOTHING_ALLOWED
from octavo.models import decoder
from octavo.models.config import ModelConfig

LOGIT_ROWS = 32
"""Logits are computed for the least multiple of so many rows that holds those in use, on a CPU: the
vocabulary is the widest layer."""
MAX_LOGIT_SIZES = 8
"""Of these multiples at the most, each a product in the program."""
SCORE_TILE = 32
"""Prompt tokens whose logits are held at once when prompt log-probabilities are asked for."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probabilities of tokens; [..., L] of the most likely ones."""

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def next_tokens(
    config: ModelConfig,
    spec: StepSpec,
    weights: Any,
    state: DeviceState,
    hidden: jax.Array,
    logits: Callable[[], jax.Array],
    slot: jax.Array,
    position: jax.Array,
    live: jax.Array,
    samples: jax.Array,
) -> tuple[DeviceState, jax.Array, Scores | None]:
    """The token for `position` of each row that samples; `NO_TOKEN` in the others. A row whose
    hidden state is not finite gets `NOT_FINITE` and stops, and one in which every token is
    forbidden gets `NOTHING_ALLOWED` and stops.

    Args:
        hidden: [S, E], each row's last.
        logits: makes the logits [S, V] of them, where bounds of them do not do.
        slot, position: int32[S].
        live, samples: bool[S], rows that compute something, and those of them that get a token.
    """
    rows: SamplingRows = jax.tree.map(lambda x: x[slot], state.sampling)

    def choose() -> SampleOutput:
        variant: Variant = "greedy" if spec.shape.is_greedy else "general"
        return sample(logits(), rows, position, state.logits, slot, samples, variant=variant)

    def choose_by_bounds() -> SampleOutput:
        active = samples & ~broken
        found, certain = lax.cond(
            wants_argmax(rows, position, active),
            partial(decoder.greedy_token, weights, config, hidden),
            lambda active: (jnp.zeros_like(slot), jnp.zeros_like(active)),
            active,
        )
        return lax.cond(certain.all(), lambda: greedy_output(found), choose)

    broken = live & ~_is_finite(hidden)
    pick = choose_by_bounds if decoder.LOGIT_BOUNDS in weights else choose
    if spec.shape.pools:  # a step of pooled rows alone needs no logits
        out = lax.cond(samples.any(), pick, lambda: greedy_output(jnp.zeros_like(slot)))
    else:
        out = pick()
    barred = samples & ~out.allowed
    # As `find_stop` does on the host: the two must agree on every row.
    is_stop = (out.tokens[:, None] == rows.stop_ids).any(axis=-1) & (position >= rows.stop_from)
    is_last = position + 1 >= state.max_total_tokens[slot]
    target = or_drop(slot, samples, state)
    logits_state, scores = state.logits, None
    if not spec.shape.is_greedy:
        logits_state = count_tokens(state.logits, slot, out.tokens, samples, rows)
        scores = Scores(
            logprob=out.logprob, rank=out.rank, top_ids=out.top_ids, top_logprobs=out.top_logprobs
        )
    state = replace(
        state,
        last_token=state.last_token.at[target].set(out.tokens, mode="drop"),
        stopped=state.stopped.at[target].set(is_stop | is_last | broken | barred, mode="drop"),
        logits=logits_state,
    )
    tokens = jnp.where(barred, NOTHING_ALLOWED, jnp.where(samples, out.tokens, NO_TOKEN))
    return state, jnp.where(broken, NOT_FINITE, tokens), scores


def logits_of(config: ModelConfig, mesh: Mesh, weights: Any, hidden: jax.Array) -> jax.Array:
    """Logits [S, V] of hidden states [S, E]; whole on each device if the devices run branches at
    once, so that no branch that reads them holds a collective."""
    logits = decoder.unembed(weights, config, hidden)
    if mesh.size > 1 and traits_of(mesh).runs_branches_at_once:
        logits = lax.with_sharding_constraint(logits, NamedSharding(mesh, PartitionSpec()))
    return logits


def logits_of_first(
    config: ModelConfig, mesh: Mesh, weights: Any, hidden: jax.Array, num_rows: jax.Array
) -> jax.Array:
    """Logits [S, V] of hidden states [S, E]; on a CPU zeros, perhaps, in rows not in use."""
    most = hidden.shape[0]
    if most <= LOGIT_ROWS or not traits_of(mesh).has_dear_rows:
        return logits_of(config, mesh, weights, hidden)
    step = max(LOGIT_ROWS, -(-most // MAX_LOGIT_SIZES))

    def first(size: int) -> jax.Array:
        logits = logits_of(config, mesh, weights, hidden[:size])
        return jnp.pad(logits, ((0, most - size), (0, 0)))

    sizes = [*range(step, most, step), most]
    return lax.switch((num_rows - 1) // step, [partial(first, size) for size in sizes])


def score_prompt(
    config: ModelConfig,
    mesh: Mesh,
    weights: Any,
    hidden: jax.Array,
    score_ids: jax.Array,
    tokens: jax.Array,
) -> Scores:
    """Scores of the prompt's own next tokens, tile by tile; skipped unless a row asks.

    Args:
        hidden: [T, E].
        score_ids: int32[T], the next tokens; negative where none is scored.
        tokens: of the step's rows. They are read so that scoring waits for sampling, which may hold
            collectives as well (`runs_branches_at_once`).
    """
    num_tokens = hidden.shape[0]
    tile = min(SCORE_TILE, num_tokens)

    def zeros(dtype: Any, *tail: int) -> jax.Array:
        return jnp.zeros((num_tokens, *tail), dtype)

    empty = Scores(
        logprob=zeros(jnp.float32),
        rank=zeros(jnp.int32),
        top_ids=zeros(jnp.int32, MAX_LOGPROBS),
        top_logprobs=zeros(jnp.float32, MAX_LOGPROBS),
    )

    def one_tile(i: jax.Array, scores: Scores) -> Scores:
        first = jnp.minimum(i * tile, num_tokens - tile)
        tile_hidden = lax.dynamic_slice_in_dim(hidden, first, tile)
        logits = logits_of(config, mesh, weights, tile_hidden)
        ids = jnp.maximum(lax.dynamic_slice_in_dim(score_ids, first, tile), 0)
        new = Scores(**score_tokens(logits, ids)._asdict())
        return jax.tree.map(
            lambda rows, part: lax.dynamic_update_slice_in_dim(rows, part, first, 0), scores, new
        )

    wanted = (score_ids >= 0).any() & (tokens >= NOTHING_ALLOWED).all()
    # A branch, as XLA computes what does not change in a loop before it, even if it runs no turn.
    return lax.cond(
        wanted,
        lambda: lax.fori_loop(0, -(-num_tokens // tile), one_tile, empty),
        lambda: empty,
    )


def or_drop(slot: jax.Array, keep: jax.Array, state: DeviceState) -> jax.Array:
    """The slot where `keep`, else one beyond the last, for scatters that drop."""
    return jnp.where(keep, slot, state.stopped.shape[0])


def _is_finite(hidden: jax.Array) -> jax.Array:
    """Which rows of hidden states [S, E] are finite. One that read or computed anything else is
    not, and its logits are made of it: looking at these would take a pass over the vocabulary."""
    return jnp.isfinite(hidden).all(axis=-1)
