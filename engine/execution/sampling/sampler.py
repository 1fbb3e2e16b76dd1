"""Choosing tokens, inside the jitted step.

Order, as in vLLM: bias, penalties and bans (`logits.py`), temperature, min-p, top-k, top-p over
what those leave, and one draw. The draw depends on (seed, position) and the row's own logits alone,
never on the batch, the row's place in it, or the path taken.

**Weights are integers.** A token weighs `round(2^28 · exp((logit - max) / temperature))`, and sums
of weights are kept exactly, in two words. Sums of integers do not depend on the order in which a
compiler adds, so batch shapes, platforms and the fast and slow paths agree to the last bit; and a
kept set is simply "the tokens that weigh at least `cutoff`". What follows from it:

- tokens of equal weight are kept or dropped together, so ties at an edge are kept;
- a token less likely than 2^-29 of the most likely one is never drawn.

**Nothing sorts the vocabulary.** The cutoff of most rows is found among their heaviest tokens
(`CANDIDATES`); where those do not hold the whole kept set, by bisection on the cutoff. Then the
token is the first, in order of id, at which the running sum of kept weights passes a uniform share
of their total: by blocks, then within one block.

Shapes: S rows, V the vocabulary, C candidates, N blocks of B tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from octavo.engine.execution.sampling.logits import (
    LogitsState,
    SamplingRows,
    needs_processing,
    process,
)
from octavo.engine.execution.sampling.logprobs import (
    MAX_LOGPROBS,
    TokenScores,
    no_scores,
    score_tokens,
)
from octavo.engine.execution.sampling.topk import (
    BLOCK,
    argmax,
    blocked,
    pick_block,
    sum_pair,
    top_k,
)

Variant: TypeAlias = Literal["greedy", "general"]

CANDIDATES = 96
"""Heaviest tokens among which a row's cutoff is sought first; above the usual top_k of 64."""

MAX_VOCAB = 2**19 - 1
"""Widest vocabulary: the sum of so many weights still fits its two words."""

_ONE = 1 << 28
"""Weight of the most likely token. Every weight is an integer that f32 holds exactly."""
_LOW_BITS = 16
_LOW = (1 << _LOW_BITS) - 1
_MIN_TEMPERATURE = 1e-6


class SampleOutput(NamedTuple):
    """What a step's rows got.

    Attributes:
        tokens: i32 `[S]`; of no meaning in inactive rows, and in those not allowed one.
        allowed: bool `[S]`, whether the row's parameters leave it any token; true in inactive rows.
        logprob, rank, top_ids, top_logprobs: as in `TokenScores`, of the raw logits; zeros when no
            active row asks for them.
    """

    tokens: Array
    allowed: Array
    logprob: Array
    rank: Array
    top_ids: Array
    top_logprobs: Array


class WideSum(NamedTuple):
    """A sum of weights, `high · 2^16 + low` with `low` < 2^16: i32 words, any shape."""

    high: Array
    low: Array

    def to_f32(self) -> Array:
        """The nearest f32, more or less; a function of the sum alone, and monotone."""
        return self.high.astype(jnp.float32) * (_LOW + 1.0) + self.low.astype(jnp.float32)


@jax.named_scope("sample")
def sample(
    logits_SV: Array,
    rows: SamplingRows,
    positions: Array,
    state: LogitsState,
    slots: Array,
    active: Array,
    *,
    variant: Variant = "general",
    num_top: int = MAX_LOGPROBS,
) -> SampleOutput:
    """One token for each row. What no active row needs is skipped at run time.

    Args:
        logits_SV: f32, raw, no NaN.
        rows: the rows' parameters.
        positions: i32 `[S]`, the place in its sequence that each row's new token will take.
        state: the state of all slots; read only.
        slots: i32 `[S]`, the rows' slots.
        active: bool `[S]`; the others are padding, whatever they hold.
        variant: static; "greedy" compiles the argmax alone, for steps whose rows are all greedy
            and ask for nothing else.
        num_top: static, alternatives scored for rows that ask for log-probabilities.

    Returns:
        Tokens and their scores.

    Raises:
        ValueError: logits are not f32 `[S, V]` with `num_top` ≤ V ≤ `MAX_VOCAB`.
    """
    num_rows, vocab_size = logits_SV.shape
    if logits_SV.dtype != jnp.float32 or not num_top <= vocab_size <= MAX_VOCAB:
        raise ValueError(
            f"logits are {logits_SV.dtype} {logits_SV.shape}: float32 of {num_top} to {MAX_VOCAB} "
            "tokens a row is sampled from"
        )
    if variant == "greedy":
        return greedy_output(argmax(logits_SV)[0], num_top)
    rows = _silence(rows, active)
    processed_S = needs_processing(rows, positions)
    tokens, allowed = lax.cond(
        (processed_S | _draws(rows)).any(),
        lambda x: _choose(x, processed_S, rows, positions, state, slots),
        lambda x: (argmax(x)[0], jnp.ones_like(active)),
        logits_SV,
    )
    scores: TokenScores = lax.cond(
        (rows.num_logprobs >= 0).any(),
        lambda x: score_tokens(x, tokens, num_top),
        lambda x: no_scores(num_rows, num_top),
        logits_SV,
    )
    return SampleOutput(tokens, allowed, *scores)


def wants_argmax(rows: SamplingRows, positions: Array, active: Array) -> Array:
    """Whether the largest raw logit is all that any active row asks for: a bool.

    Args: as for `sample`.
    """
    rows = _silence(rows, active)
    asks = needs_processing(rows, positions) | _draws(rows) | (rows.num_logprobs >= 0)
    return ~asks.any()


def greedy_output(tokens: Array, num_top: int = MAX_LOGPROBS) -> SampleOutput:
    """What `sample` returns for rows of which `wants_argmax` is true, given their tokens."""
    allowed = jnp.ones(tokens.shape, bool)
    return SampleOutput(tokens, allowed, *no_scores(tokens.shape[0], num_top))


def _silence(rows: SamplingRows, active: Array) -> SamplingRows:
    """Makes inactive rows greedy rows that ask for nothing."""
    return dataclasses.replace(
        rows,
        temperature=jnp.where(active, rows.temperature, 0.0),
        stop_from=jnp.where(active, rows.stop_from, 0),
        num_logprobs=jnp.where(active, rows.num_logprobs, -1),
        flags=jnp.where(active, rows.flags, 0),
    )


def _draws(rows: SamplingRows) -> Array:
    """Rows whose token is drawn; `top_k` = 1 takes the argmax even where it has equals."""
    return (rows.temperature > 0.0) & (rows.top_k != 1)


def _choose(
    logits_SV: Array,
    processed_S: Array,
    rows: SamplingRows,
    positions: Array,
    state: LogitsState,
    slots: Array,
) -> tuple[Array, Array]:
    """Tokens, and which rows are allowed any."""
    # Weights leave the branches instead of logits: those of untouched rows would be a whole copy.
    greedy_S, max_S, weights_SV = lax.cond(
        processed_S.any(),
        lambda x: _weigh(process(x, rows, positions, state, slots), rows.temperature),
        lambda x: _weigh(x, rows.temperature),
        logits_SV,
    )
    # A row that forbids every token has no weights to draw by.
    allowed_S = ~processed_S | (max_S > -jnp.inf)
    draws_S = _draws(rows) & jnp.isfinite(max_S)
    drawn_S = lax.cond(
        draws_S.any(),
        lambda w: _draw(w, draws_S, rows, positions),
        lambda w: greedy_S,
        weights_SV,
    )
    return jnp.where(draws_S, drawn_S, greedy_S), allowed_S


def _weigh(logits_SV: Array, temperature_S: Array) -> tuple[Array, Array, Array]:
    """Greedy tokens, largest logits and weights."""
    greedy_S, max_S = argmax(logits_SV)
    return greedy_S, max_S, token_weights(logits_SV, max_S, temperature_S)


@jax.named_scope("draw")
def _draw(weights_SV: Array, draws_S: Array, rows: SamplingRows, positions: Array) -> Array:
    top_k_S = jnp.where(draws_S, rows.top_k, 0)
    top_p_S = jnp.where(draws_S, rows.top_p, 1.0)
    min_p_S = jnp.where(draws_S, rows.min_p, 0.0)
    truncated_S = (top_k_S > 0) | (top_p_S < 1.0) | (min_p_S > 0.0)
    cutoff_S = lax.cond(
        truncated_S.any(),
        lambda w: find_cutoff(w, top_k_S, top_p_S, min_p_S),
        lambda w: jnp.ones_like(top_p_S),
        weights_SV,
    )
    return _token_at_share(weights_SV, cutoff_S, random_words(rows.seed, positions))


def token_weights(logits_SV: Array, max_S: Array, temperature_S: Array) -> Array:
    """Weights `[S, V]`, integers from 0 to 2^28 in proportion to the tokens' probabilities.

    They are stored as f32, which holds each of them exactly (the larger have no more digits than
    the exponential they come from); their sums are taken in integers.

    Args:
        logits_SV: f32.
        max_S: f32, the rows' largest logits.
        temperature_S: f32.

    Returns:
        The weights; of no meaning in rows whose largest logit is not finite.
    """
    temperature_S = jnp.maximum(temperature_S, _MIN_TEMPERATURE)
    scaled_SV = (logits_SV - max_S[:, None]) / temperature_S[:, None]
    return jnp.round(jnp.exp(scaled_SV) * float(_ONE))


def random_words(seed: Array, positions: Array) -> Array:
    """One uniform word a row, u32 `[S]`, from its seed u32 `[S, 2]` and position alone."""

    def word(seed: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), dtype=jnp.uint32)

    return jax.vmap(word)(seed, positions)


@jax.named_scope("find_cutoff")
def find_cutoff(weights_SV: Array, top_k_S: Array, top_p_S: Array, min_p_S: Array) -> Array:
    """Least weight that each row keeps, f32 `[S]`, ≥ 1.

    Of the tokens that weigh at least `min_p` of the most likely one, the `top_k` heaviest, and of
    these the fewest that hold `top_p` of their weight; each time with all that tie with the last.

    Args:
        weights_SV: of `token_weights`.
        top_k_S: i32, 0 is off.
        top_p_S: f32, 1 is off.
        min_p_S: f32, 0 is off.

    Returns:
        The cutoffs.
    """
    floor_S = jnp.maximum(jnp.ceil(min_p_S * float(_ONE)), 1.0)
    candidates_SC = _heaviest(weights_SV)
    last_S = candidates_SC[:, -1]

    num_candidates = candidates_SC.shape[1]
    kth = jnp.clip(top_k_S - 1, 0, num_candidates - 1)[:, None]
    kth_S = jnp.take_along_axis(candidates_SC, kth, axis=1)[:, 0]
    has_kth_S = (top_k_S > 0) & (top_k_S <= num_candidates)
    floor_S = jnp.where(has_kth_S, jnp.maximum(floor_S, kth_S), floor_S)
    open_S = (top_k_S > num_candidates) & (last_S >= floor_S)
    floor_S = _greatest(
        lambda cutoff: _count_from(weights_SV, cutoff) >= top_k_S,
        floor_S,
        jnp.where(open_S, last_S, floor_S),
    )

    goal_S = top_p_S * _weight_from(weights_SV, floor_S).to_f32()
    running_SC = _running_sum(_kept(candidates_SC, floor_S))
    enough_SC = running_SC.to_f32() >= goal_S[:, None]
    # Weights descend, so the first that is enough is the heaviest that is.
    found_S = jnp.where(enough_SC, candidates_SC, 0.0).max(axis=-1)
    wants_S = top_p_S < 1.0
    open_S = wants_S & ~enough_SC.any(axis=-1)
    floor_S = jnp.where(wants_S, jnp.maximum(floor_S, found_S), floor_S)
    return _greatest(
        lambda cutoff: _weight_from(weights_SV, cutoff).to_f32() >= goal_S,
        floor_S,
        jnp.where(open_S, last_S, floor_S),
    )


def _heaviest(weights_SV: Array) -> Array:
    """The `CANDIDATES` largest weights, descending, `[S, C]`; zeros where there are fewer."""
    num_found = min(CANDIDATES, weights_SV.shape[1])
    values_SC = top_k(weights_SV, num_found)[0]
    return jnp.pad(values_SC, ((0, 0), (0, CANDIDATES - num_found)))


def _kept(weights: Array, cutoff_S: Array) -> Array:
    """Weights `[S, ...]` as integers, with zeros below the row's cutoff (≥ 1)."""
    cutoff = cutoff_S.reshape((-1,) + (1,) * (weights.ndim - 1))
    return jnp.where(weights >= cutoff, weights, 0.0).astype(jnp.int32)


def _greatest(holds: Callable[[Array], Array], low_S: Array, high_S: Array) -> Array:
    """Greatest cutoff of each row, from `low_S` to `high_S`, for which `holds`; else `low_S`.

    `holds` must not hold again above a cutoff for which it fails. Rows with equal ends are done,
    and no pass is made when all are. Positive f32 are in the order of their bits: halving those
    visits only numbers that a weight can be.
    """

    def weight(bits_S: Array) -> Array:
        return lax.bitcast_convert_type(bits_S, jnp.float32)

    def halve(ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low_S, high_S = ends
        middle_S = low_S + (high_S - low_S + 1) // 2
        holds_S = holds(weight(middle_S))
        return jnp.where(holds_S, middle_S, low_S), jnp.where(holds_S, high_S, middle_S - 1)

    ends = (
        lax.bitcast_convert_type(low_S, jnp.int32),
        lax.bitcast_convert_type(high_S, jnp.int32),
    )
    return weight(lax.while_loop(lambda ends: (ends[0] < ends[1]).any(), halve, ends)[0])


@jax.named_scope("token_at_share")
def _token_at_share(weights_SV: Array, cutoff_S: Array, word_S: Array) -> Array:
    """First token, by id, at which the running kept weight exceeds `word / 2^32` of their sum."""
    weights_SNB = blocked(weights_SV, 0.0)
    by_block = _sum(_kept(weights_SNB, cutoff_S))
    running = _normal(jnp.cumsum(by_block.high, axis=-1), jnp.cumsum(by_block.low, axis=-1))
    target = _share(WideSum(running.high[:, -1], running.low[:, -1]), word_S)
    before_SN = _at_most(running, target)
    block_S = before_SN.sum(axis=-1, dtype=jnp.int32)
    passed = _sum_of(by_block, before_SN)
    rest = _normal(target.high - passed.high, target.low - passed.low)
    inside = _running_sum(_kept(pick_block(weights_SNB, block_S), cutoff_S))
    inside_S = _at_most(inside, rest).sum(axis=-1, dtype=jnp.int32)
    return block_S * BLOCK + inside_S


def _share(total: WideSum, word_S: Array) -> WideSum:
    """`floor(total · word / 2^32)`, below `total`: long multiplication by 16-bit digits."""
    high, low = total.high.astype(jnp.uint32), total.low.astype(jnp.uint32)
    c2, c1, c0 = high >> _LOW_BITS, high & _LOW, low
    w1, w0 = word_S >> _LOW_BITS, word_S & _LOW
    a, b = w1 * c0, w0 * c1
    digit = (a & _LOW) + (b & _LOW) + ((w0 * c0) >> _LOW_BITS)
    carry = (a >> _LOW_BITS) + (b >> _LOW_BITS) + (digit >> _LOW_BITS)
    a, b = w1 * c1, w0 * c2
    digit = (a & _LOW) + (b & _LOW) + carry
    rest = (a >> _LOW_BITS) + (b >> _LOW_BITS) + (digit >> _LOW_BITS) + w1 * c2
    return WideSum(rest.astype(jnp.int32), (digit & _LOW).astype(jnp.int32))


def _normal(high: Array, low: Array) -> WideSum:
    """The sum with its low word's carry (or borrow) moved to the high word."""
    return WideSum(high + (low >> _LOW_BITS), low & _LOW)


def _sum(weights: Array) -> WideSum:
    """Exact sum along the last axis, of fewer than 2^15 entries."""
    return _normal(*sum_pair(weights >> _LOW_BITS, weights & _LOW))


def _running_sum(weights: Array) -> WideSum:
    """Exact running sum along the last axis, of fewer than 2^15 entries."""
    return _normal(jnp.cumsum(weights >> _LOW_BITS, axis=-1), jnp.cumsum(weights & _LOW, axis=-1))


def _sum_of(sums: WideSum, chosen: Array) -> WideSum:
    """Sum along the last axis of the sums that are chosen."""
    return _normal(*sum_pair(jnp.where(chosen, sums.high, 0), jnp.where(chosen, sums.low, 0)))


def _weight_from(weights_SV: Array, cutoff_S: Array) -> WideSum:
    """What the tokens that weigh at least the cutoff weigh together."""
    by_block = _sum(_kept(blocked(weights_SV, 0.0), cutoff_S))
    return _sum_of(by_block, jnp.ones_like(by_block.low, dtype=bool))


def _count_from(weights_SV: Array, cutoff_S: Array) -> Array:
    """How many tokens weigh at least the cutoff, i32 `[S]`."""
    kept_SNB = _kept(blocked(weights_SV, 0.0), cutoff_S)
    count, _ = sum_pair((kept_SNB > 0).astype(jnp.int32), jnp.zeros_like(kept_SNB))
    return count.sum(axis=-1)


def _at_most(sums: WideSum, bound: WideSum) -> Array:
    """Where the sums `[S, N]` do not exceed the row's bound `[S]`."""
    high, low = bound.high[:, None], bound.low[:, None]
    return (sums.high < high) | ((sums.high == high) & (sums.low <= low))
