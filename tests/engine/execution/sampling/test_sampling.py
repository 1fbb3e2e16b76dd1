"""Drawing tokens, against oracles that sort, in NumPy, from the definitions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.execution.sampling import sampler
from octavo.engine.execution.sampling.logits import (
    HAS_BIAS,
    LogitsState,
    SamplingRows,
    count_tokens,
    logits_row,
    set_row,
)

INF = np.inf


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@partial(jax.jit, static_argnames=("variant", "num_top"))
def run(logits, rows, positions, state, slots, active, variant="general", num_top=20):
    return sampler.sample(
        logits, rows, positions, state, slots, active, variant=variant, num_top=num_top
    )


def rows_of(num_rows: int, **fields) -> SamplingRows:
    """Greedy rows except for the fields given, each a scalar or one value a row."""
    rows = SamplingRows.init(num_rows, num_stop_ids=3)
    arrays = {
        name: jnp.asarray(np.broadcast_to(np.asarray(value), getattr(rows, name).shape)).astype(
            getattr(rows, name).dtype
        )
        for name, value in fields.items()
    }
    return dataclasses.replace(rows, **arrays)


def seeds_of(num_rows: int, first: int = 0) -> np.ndarray:
    return np.stack([np.arange(num_rows) + first, np.full(num_rows, 7)], axis=1)


def choose(logits, rows, positions=None, state=None, slots=None, active=None, **kwargs):
    """Sampled tokens, with plain defaults for what a test does not care about."""
    num_rows, vocab_size = logits.shape
    if positions is None:
        positions = np.arange(num_rows)
    if state is None:
        state = LogitsState.init(2, vocab_size, 2, 3)
    if slots is None:
        slots = np.zeros(num_rows)
    if active is None:
        active = np.ones(num_rows, bool)
    out = run(
        jnp.asarray(logits, jnp.float32),
        rows,
        jnp.asarray(positions, jnp.int32),
        state,
        jnp.asarray(slots, jnp.int32),
        jnp.asarray(active),
        **kwargs,
    )
    return np.asarray(out.tokens)


def random_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> np.ndarray:
    """Rows of several temperaments: peaked, flat, full of ties, and with many tokens forbidden."""
    logits = rng.normal(size=(num_rows, vocab_size)) * rng.uniform(0.1, 6, size=(num_rows, 1))
    logits[1::4] = np.round(logits[1::4])
    logits[2::8] = 1.5
    forbidden = rng.random((num_rows, vocab_size)) < 0.6
    forbidden[:, rng.integers(vocab_size)] = False
    logits[3::4] = np.where(forbidden, -INF, logits)[3::4]
    return logits.astype(np.float32)


def random_truncation(rng: np.random.Generator, num_rows: int, vocab_size: int) -> dict:
    """Every mix of the parameters, each off in about a third of the rows."""

    def some(values, off):
        return np.where(rng.random(num_rows) < 0.35, off, values)

    top_k = np.where(
        rng.random(num_rows) < 0.5,
        rng.integers(2, 70, num_rows),
        rng.integers(2, vocab_size + 50, num_rows),
    )
    return {
        "temperature": rng.choice([0.3, 0.8, 1.0, 2.0], num_rows).astype(np.float32),
        "top_k": some(top_k, 0).astype(np.int32),
        "top_p": some(rng.uniform(0.05, 0.999, num_rows), 1.0).astype(np.float32),
        "min_p": some(10 ** rng.uniform(-4, 0, num_rows), 0.0).astype(np.float32),
    }


def kept_by_definition(logits, temperature, top_k, top_p, min_p) -> tuple[np.ndarray, bool]:
    """Which tokens of one row may be drawn, in f64 and by sorting, and whether rounding decides."""
    scaled = logits.astype(np.float64) / np.float64(temperature)
    probs = np.exp(scaled - scaled.max())
    keep = probs >= np.float64(min_p)
    close = bool(min_p > 0 and np.any(np.abs(probs / min_p - 1) < 1e-5))
    if 0 < top_k < len(probs):
        kth = np.sort(np.where(keep, scaled, -INF))[::-1][top_k - 1]
        keep &= scaled >= kth
    if top_p < 1:
        share = np.where(keep, probs, 0.0)
        share = share / share.sum()
        values, which, counts = np.unique(share, return_inverse=True, return_counts=True)
        above = np.append(np.cumsum((values * counts)[::-1])[::-1][1:], 0.0)
        close |= bool(np.any(np.abs(above - top_p) < 1e-5))
        keep &= above[which] < top_p
    if dropped := probs[~keep].max(initial=0.0):
        # Tokens on either side of the edge may weigh the same once rounded.
        close |= bool(probs[keep].min() - dropped < 2.0**-27 + 1e-6 * dropped)
    # What is less likely than 2^-29 of the most likely token counts as impossible.
    close |= bool(np.any(keep & (np.abs(probs * 2**29 - 1) < 1e-5)))
    return keep & (probs > 2.0**-29), close


def draw_by_definition(weights: np.ndarray, kept: np.ndarray, word: int) -> int:
    """First token at which the running kept weight passes the uniform share of their total."""
    running = np.cumsum(np.where(kept, weights.astype(np.int64), 0))
    return int(np.searchsorted(running, (int(running[-1]) * word) >> 32, side="right"))


@jax.jit
def weigh_and_cut(logits, temperature, top_k, top_p, min_p):
    weights = sampler.token_weights(logits, logits.max(axis=-1), temperature)
    return weights, sampler.find_cutoff(weights, top_k, top_p, min_p)


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "seed"), [(96, 50, 0), (96, 1000, 1), (96, 1000, 2)]
)
def test_kept_sets_and_tokens_are_those_of_the_definitions(num_rows, vocab_size, seed):
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, num_rows, vocab_size)
    params = random_truncation(rng, num_rows, vocab_size)
    weights, cutoff = (np.asarray(x) for x in weigh_and_cut(logits, **params))
    words = np.asarray(
        sampler.random_words(
            jnp.asarray(seeds_of(num_rows), jnp.uint32), jnp.arange(num_rows, dtype=jnp.int32)
        )
    )
    tokens = choose(logits, rows_of(num_rows, seed=seeds_of(num_rows), **params))
    decided = 0
    for row in range(num_rows):
        kept = weights[row] >= cutoff[row]
        expected, close = kept_by_definition(
            logits[row], *(params[name][row] for name in ("temperature", "top_k", "top_p", "min_p"))
        )
        if not close:
            decided += 1
            np.testing.assert_array_equal(kept, expected, err_msg=f"row {row}")
        assert tokens[row] == draw_by_definition(weights[row], kept, int(words[row])), row
    assert decided > 0.8 * num_rows


def test_a_wide_vocabulary_keeps_and_draws_as_defined():
    """Fast and slow ways at a real size: peaked rows fit the candidates, flat ones do not."""
    rng = np.random.default_rng(3)
    num_rows, vocab_size = 8, 49_152
    logits = rng.normal(size=(num_rows, vocab_size)).astype(np.float32)
    logits *= np.array([8, 5, 3, 2, 1, 0.5, 0.1, 0], np.float32)[:, None]
    params = {
        "temperature": np.full(num_rows, 0.9, np.float32),
        "top_k": np.array([50, 0, 0, 3000, 64, 0, 0, 96], np.int32),
        "top_p": np.array([0.9, 0.95, 0.9, 0.8, 1.0, 0.9, 0.5, 0.7], np.float32),
        "min_p": np.array([0, 0.01, 0, 0, 0, 0.05, 0, 0], np.float32),
    }
    weights, cutoff = (np.asarray(x) for x in weigh_and_cut(logits, **params))
    seeds = seeds_of(num_rows, 100)
    words = np.asarray(
        sampler.random_words(jnp.asarray(seeds, jnp.uint32), jnp.arange(num_rows, dtype=jnp.int32))
    )
    tokens = choose(logits, rows_of(num_rows, seed=seeds, **params))
    for row in range(num_rows):
        kept = weights[row] >= cutoff[row]
        expected, close = kept_by_definition(
            logits[row], *(params[name][row] for name in ("temperature", "top_k", "top_p", "min_p"))
        )
        if not close:
            np.testing.assert_array_equal(kept, expected, err_msg=f"row {row}")
        assert tokens[row] == draw_by_definition(weights[row], kept, int(words[row])), row


def test_weights_are_the_probabilities_to_nine_digits_of_the_largest():
    rng = np.random.default_rng(4)
    logits = random_logits(rng, 16, 300)
    temperature = rng.uniform(0.2, 2, 16).astype(np.float32)
    off = np.zeros(16, np.int32), np.ones(16, np.float32), np.zeros(16, np.float32)
    weights, cutoff = (np.asarray(x) for x in weigh_and_cut(logits, temperature, *off))
    scaled = logits.astype(np.float64) / temperature.astype(np.float64)[:, None]
    exact = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    np.testing.assert_array_equal(weights, np.round(weights))
    # Half a unit of 2^-28 from rounding, the rest from an f32 exponential of an f32 quotient.
    np.testing.assert_allclose(weights / 2.0**28, exact, rtol=5e-6, atol=2.0**-28)
    np.testing.assert_array_equal(cutoff, 1.0)


def test_the_uniform_share_of_a_sum_is_exact():
    rng = np.random.default_rng(5)
    totals = np.concatenate([rng.integers(1, 2**47, 200), [1, 2**28, 2**47 - 1]])
    words = np.concatenate([rng.integers(0, 2**32, 200), [2**32 - 1, 0, 2**32 - 1]])
    total = sampler.WideSum(
        jnp.asarray(totals >> 16, jnp.int32), jnp.asarray(totals & 0xFFFF, jnp.int32)
    )
    share = sampler._share(total, jnp.asarray(words, jnp.uint32))
    got = (np.asarray(share.high, np.int64) << 16) + np.asarray(share.low, np.int64)
    assert got.tolist() == [(int(t) * int(w)) >> 32 for t, w in zip(totals, words, strict=True)]


def test_a_share_that_ends_on_a_token_belongs_to_the_next():
    weights = np.zeros((6, 300), np.float32)
    weights[:, [3, 130, 131, 299]] = [5.0, 5.0, 2.0, 5.0]
    words = [0, 2**30, 2**32 // 3, 2**31, 2**32 // 3 * 2 + 1, 2**32 - 1]
    tokens = sampler._token_at_share(
        jnp.asarray(weights), jnp.full(6, 3.0), jnp.asarray(words, jnp.uint32)
    )
    assert np.asarray(tokens).tolist() == [3, 3, 3, 130, 299, 299]
    equal = jnp.full((4, 4), 7.0)
    words = [0, 2**30, 2**31, 3 * 2**30]
    tokens = sampler._token_at_share(equal, jnp.ones(4), jnp.asarray(words, jnp.uint32))
    assert np.asarray(tokens).tolist() == [0, 1, 2, 3]


def test_top_p_is_satisfied_by_a_share_equal_to_it():
    weights = np.zeros((3, 200), np.float32)
    weights[:, [0, 50, 199]] = [1024.0, 512.0, 512.0]
    top_p = np.array([0.5, np.nextafter(np.float32(0.5), np.float32(1)), 1.0], np.float32)
    cutoff = sampler.find_cutoff(
        jnp.asarray(weights), jnp.zeros(3, jnp.int32), jnp.asarray(top_p), jnp.zeros(3)
    )
    assert np.asarray(cutoff).tolist() == [1024.0, 512.0, 1.0]


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_follow_the_distribution(vary, top_p):
    num_rows, vocab_size = 8192, 40
    row = np.random.default_rng(6).normal(size=vocab_size).astype(np.float32)
    many = np.arange(num_rows)
    rows = rows_of(
        num_rows,
        temperature=0.7,
        top_p=top_p,
        seed=seeds_of(num_rows) if vary == "seed" else np.array([3, 4]),
    )
    positions = many if vary == "position" else np.full(num_rows, 11)
    tokens = choose(np.tile(row, (num_rows, 1)), rows, positions)
    kept, _ = kept_by_definition(row, np.float32(0.7), 0, np.float32(top_p), 0.0)
    probs = np.where(kept, np.exp(row.astype(np.float64) / np.float32(0.7)), 0)
    probs /= probs.sum()
    counts = np.bincount(tokens, minlength=vocab_size)
    assert counts[~kept].sum() == 0
    expected = num_rows * probs[kept]
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = kept.sum() - 1
    # Four deviations: the seeds are fixed, so this either always holds or never does.
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def test_a_row_draws_the_same_alone_and_among_others():
    rng = np.random.default_rng(7)
    num_rows, vocab_size = 32, 1000
    logits = random_logits(rng, num_rows, vocab_size)
    params = random_truncation(rng, num_rows, vocab_size) | {"seed": seeds_of(num_rows)}
    positions = rng.integers(0, 5000, num_rows)
    together = choose(logits, rows_of(num_rows, **params), positions)
    order = rng.permutation(num_rows)
    shuffled = choose(
        logits[order],
        rows_of(num_rows, **{name: value[order] for name, value in params.items()}),
        positions[order],
    )
    np.testing.assert_array_equal(shuffled, together[order])
    for row in range(num_rows):
        one = {name: value[row : row + 1] for name, value in params.items()}
        alone = choose(logits[row : row + 1], rows_of(1, **one), positions[row : row + 1])
        assert alone[0] == together[row], row


def test_draws_change_with_the_position_and_with_either_word_of_the_seed():
    seed = jnp.asarray([[0, 1], [0, 1], [0, 2], [1, 1]], jnp.uint32)
    words = np.asarray(sampler.random_words(seed, jnp.asarray([5, 6, 5, 5], jnp.int32)))
    assert len(set(words.tolist())) == 4


def test_random_words_never_change_between_versions():
    """A seed is a promise: the same request gives the same text after an upgrade."""
    seed = jnp.asarray([[0, 0], [1, 2], [2**31, 2**32 - 1]], jnp.uint32)
    words = np.asarray(sampler.random_words(seed, jnp.asarray([0, 17, 131_071], jnp.int32)))
    assert words.tolist() == GOLDEN_WORDS


GOLDEN_WORDS = [3_617_712_097, 177_398_854, 3_948_539_179]


@pytest.mark.parametrize("variant", ["greedy", "general"])
def test_greedy_takes_the_lowest_of_equal_tokens(variant):
    logits = np.zeros((4, 1000), np.float32)
    logits[0, [130, 7, 999]] = 2.0
    logits[1, 999] = 2.0
    logits[2] = -INF
    logits[2, 500] = -80.0
    tokens = choose(logits, rows_of(4), variant=variant)
    assert tokens.tolist() == [7, 999, 500, 0]


def test_top_k_of_one_is_greedy_at_any_temperature():
    logits = random_logits(np.random.default_rng(8), 32, 1000)
    tokens = choose(logits, rows_of(32, temperature=2.0, top_k=1, seed=seeds_of(32)))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))


def test_greedy_and_drawn_rows_share_a_batch():
    logits = random_logits(np.random.default_rng(9), 32, 1000)
    temperature = np.where(np.arange(32) % 2 == 0, 0.0, 1.5)
    mixed = choose(logits, rows_of(32, temperature=temperature, seed=seeds_of(32)))
    drawn = choose(logits, rows_of(32, temperature=1.5, seed=seeds_of(32)))
    np.testing.assert_array_equal(mixed, np.where(temperature > 0, drawn, logits.argmax(axis=-1)))
    assert (drawn != logits.argmax(axis=-1)).sum() > 8


def test_a_tiny_temperature_draws_the_most_likely_token():
    logits = np.random.default_rng(10).normal(size=(32, 1000)).astype(np.float32)
    tokens = choose(logits, rows_of(32, temperature=1e-30, seed=seeds_of(32)))
    np.testing.assert_array_equal(tokens, logits.argmax(axis=-1))


def test_a_row_without_any_allowed_token_still_yields_one_of_the_vocabulary():
    logits = np.full((32, 1000), -INF, np.float32)
    tokens = choose(logits, rows_of(32, temperature=1.0, top_p=0.9, top_k=7, seed=seeds_of(32)))
    assert ((tokens >= 0) & (tokens < 1000)).all()


def test_inactive_rows_neither_disturb_nor_ask():
    logits = random_logits(np.random.default_rng(11), 32, 1000)
    active = np.arange(32) < 20
    rows = rows_of(
        32,
        temperature=np.where(active, 1.0, np.nan),
        seed=seeds_of(32),
        num_logprobs=np.where(active, -1, 5),
        flags=np.where(active, 0, HAS_BIAS),
    )
    poisoned = np.where(active[:, None], logits, np.nan)
    out = run(
        jnp.asarray(poisoned),
        rows,
        jnp.arange(32, dtype=jnp.int32),
        LogitsState.init(2, 1000, 2, 3),
        jnp.zeros(32, jnp.int32),
        jnp.asarray(active),
    )
    expected = choose(logits, rows_of(32, temperature=1.0, seed=seeds_of(32)))
    np.testing.assert_array_equal(np.asarray(out.tokens)[active], expected[active])
    assert not np.asarray(out.top_logprobs).any()


def test_allowed_tokens_are_the_only_ones_drawn():
    num_rows, vocab_size = 32, 1000
    logits = np.random.default_rng(12).normal(size=(num_rows, vocab_size)).astype(np.float32)
    allowed = [3, 500, 999]
    state = set_row(
        LogitsState.init(2, vocab_size, 2, 3),
        1,
        logits_row(vocab_size, allowed=allowed, num_bad_words=2, bad_word_tokens=3),
    )
    constrained = np.arange(num_rows) % 2
    rows = rows_of(
        num_rows,
        temperature=2.0,
        seed=seeds_of(num_rows),
        flags=np.where(constrained == 1, HAS_BIAS, 0),
    )
    tokens = choose(logits, rows, state=state, slots=constrained)
    assert set(tokens[constrained == 1].tolist()) == set(allowed)
    free = choose(logits, rows_of(num_rows, temperature=2.0, seed=seeds_of(num_rows)))
    np.testing.assert_array_equal(tokens[constrained == 0], free[constrained == 0])


def test_stops_wait_for_min_tokens():
    logits = np.zeros((32, 1000), np.float32)
    logits[:, 42] = 9.0
    logits[:, 43] = 5.0
    positions = np.arange(32)
    tokens = choose(logits, rows_of(32, stop_ids=[42, -1, 999], stop_from=20), positions)
    np.testing.assert_array_equal(tokens, np.where(positions < 20, 43, 42))


def test_scores_are_of_the_raw_logits():
    logits = np.random.default_rng(13).normal(size=(32, 1000)).astype(np.float32)
    logits[:, 42] = 20.0
    rows = rows_of(
        32,
        stop_ids=[42, -1, -1],
        stop_from=100,
        temperature=1.7,
        seed=seeds_of(32),
        num_logprobs=np.where(np.arange(32) == 4, 3, -1),
    )
    out = run(
        jnp.asarray(logits),
        rows,
        jnp.arange(32, dtype=jnp.int32),
        LogitsState.init(2, 1000, 2, 3),
        jnp.zeros(32, jnp.int32),
        jnp.ones(32, bool),
    )
    token = int(out.tokens[4])
    logprobs = logits[4] - np.log(np.exp(logits[4].astype(np.float64)).sum())
    assert token != 42
    assert int(out.top_ids[4, 0]) == 42
    np.testing.assert_allclose(float(out.logprob[4]), logprobs[token], rtol=1e-5)
    assert int(out.rank[4]) == 1 + (logits[4] > logits[4, token]).sum()


def test_logits_of_another_type_are_refused():
    rows = rows_of(1)
    state = LogitsState.init(1, 64, 1, 2)
    row = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="bfloat16"):
        sampler.sample(jnp.zeros((1, 64), jnp.bfloat16), rows, row, state, row, jnp.ones(1, bool))
    with pytest.raises(ValueError, match="20 to"):
        sampler.sample(jnp.zeros((1, 12)), rows, row, state, row, jnp.ones(1, bool))


def test_sampling_in_a_device_loop_never_copies_the_state_of_the_slots():
    """Reading the slots under a condition and counting afterwards leaves the donated state put."""
    num_slots, vocab_size = 65, 50_000

    def steps(state, logits, rows, slots, active):
        def step(position, carry):
            state, tokens = carry
            positions = jnp.full_like(tokens, position)
            out = sampler.sample(logits, rows, positions, state, slots, active)
            return count_tokens(state, slots, out.tokens, active, rows), out.tokens

        return jax.lax.fori_loop(0, 4, step, (state, jnp.zeros_like(slots)))

    state = jax.eval_shape(lambda: LogitsState.init(num_slots, vocab_size))
    rows = jax.eval_shape(lambda: SamplingRows.init(2))
    slots = jax.ShapeDtypeStruct((2,), jnp.int32)
    compiled = (
        jax.jit(steps, donate_argnums=0)
        .lower(
            state,
            jax.ShapeDtypeStruct((2, vocab_size), jnp.float32),
            rows,
            slots,
            jax.ShapeDtypeStruct((2,), jnp.bool_),
        )
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < num_slots * vocab_size * 4 / 2
