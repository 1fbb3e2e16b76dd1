"""Penalties, biases and bans, against loops over tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.errors import InvalidRequestError
from octavo.engine.execution.sampling.logits import (
    HAS_BAD_WORDS,
    HAS_BIAS,
    NEEDS_PENALTIES,
    LogitsState,
    SamplingRows,
    count_tokens,
    logits_row,
    needs_processing,
    process,
    set_row,
)

VOCAB = 75
SIZES = {"num_bad_words": 4, "bad_word_tokens": 4}
run = jax.jit(process)


@pytest.fixture(autouse=True)
def _strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def state_with(rows: dict[int, dict], num_slots: int = 5) -> LogitsState:
    state = LogitsState.init(num_slots, VOCAB, **SIZES)
    for slot, values in rows.items():
        state = set_row(state, slot, logits_row(VOCAB, **values, **SIZES))
    return state


def rows_with(num_rows: int, **fields) -> SamplingRows:
    rows = SamplingRows.init(num_rows, num_stop_ids=2)
    return dataclasses.replace(
        rows,
        **{
            name: jnp.asarray(np.asarray(value)).astype(getattr(rows, name).dtype)
            for name, value in fields.items()
        },
    )


def ints(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def test_penalties_and_biases_are_those_of_a_loop_over_tokens():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32) * 3
    prompts = [rng.integers(0, VOCAB, 20).tolist() for _ in range(3)]
    outputs = [rng.integers(0, VOCAB, 30).tolist() for _ in range(3)]
    biases = [{3: 5.0, 74: -2.5}, {}, {0: 100.0}]
    slots = [4, 0, 2]
    state = state_with(
        {
            slot: {"prompt": p, "output": o, "logit_bias": b}
            for slot, p, o, b in zip(slots, prompts, outputs, biases, strict=True)
        }
    )
    penalties = {
        "presence_penalty": [0.5, 0.0, -1.0],
        "frequency_penalty": [0.25, 0.0, 1.5],
        "repetition_penalty": [1.3, 0.7, 1.0],
    }
    rows = rows_with(3, flags=[NEEDS_PENALTIES | HAS_BIAS] * 3, **penalties)
    got = run(jnp.asarray(logits), rows, ints(0, 0, 0), state, ints(*slots))

    expected = logits.astype(np.float64)
    for row in range(3):
        presence, frequency, repetition = (values[row] for values in penalties.values())
        for token in range(VOCAB):
            x = expected[row, token] + biases[row].get(token, 0.0)
            count = outputs[row].count(token)
            if count or token in prompts[row]:
                x = x / repetition if x > 0 else x * repetition
            expected[row, token] = x - frequency * count - (presence if count else 0.0)
    np.testing.assert_allclose(np.asarray(got), expected, rtol=1e-5, atol=1e-5)


def test_rows_without_flags_ignore_what_their_slot_holds():
    state = state_with({1: {"output": [5] * 9, "allowed": [1], "bad_words": [[5, 6]]}})
    logits = np.random.default_rng(1).normal(size=(2, VOCAB)).astype(np.float32)
    rows = rows_with(2, flags=[0, NEEDS_PENALTIES], repetition_penalty=[2.0, 1.5])
    got = np.asarray(run(jnp.asarray(logits), rows, ints(9, 9), state, ints(1, 1)))
    np.testing.assert_array_equal(got[0], logits[0])
    assert np.isfinite(got[1]).all()
    assert got[1, 5] != logits[1, 5]


def test_allowed_tokens_and_one_token_bad_words_forbid_the_rest():
    state = state_with({0: {"allowed": [2, 3, 70], "bad_words": [[3]], "logit_bias": {2: 1.0}}})
    got = run(jnp.zeros((1, VOCAB)), rows_with(1, flags=[HAS_BIAS]), ints(0), state, ints(0))
    assert np.flatnonzero(np.isfinite(np.asarray(got)[0])).tolist() == [2, 70]
    assert float(got[0, 2]) == 1.0


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], []),
        ([1], [2]),
        ([9, 1], [2]),
        ([1, 2], [3]),
        ([7, 1, 2], [3]),
        ([8, 7, 1], [2, 6]),
        ([1, 9], []),
        ([5, 5, 5, 5], [5]),
    ],
)
def test_bad_words_are_banned_only_where_they_would_be_completed(output, banned):
    words = [[1, 2], [1, 2, 3], [8, 7, 1, 6], [5, 5]]
    state = state_with({2: {"bad_words": words, "output": output}})
    rows = rows_with(1, flags=[HAS_BAD_WORDS])
    got = run(jnp.zeros((1, VOCAB)), rows, ints(0), state, ints(2))
    assert np.flatnonzero(np.isneginf(np.asarray(got)[0])).tolist() == banned


def test_stops_are_banned_before_their_first_position_alone():
    rows = rows_with(3, stop_from=[10, 10, 0], stop_ids=[[7, -1], [7, 74], [7, 8]])
    positions = ints(10, 9, 0)
    assert np.asarray(needs_processing(rows, positions)).tolist() == [False, True, False]
    got = run(jnp.zeros((3, VOCAB)), rows, positions, state_with({}), ints(0, 1, 2))
    banned = [np.flatnonzero(np.isneginf(row)).tolist() for row in np.asarray(got)]
    assert banned == [[], [7, 74], []]


def test_tokens_are_counted_for_active_rows_that_keep_counts():
    state = state_with({0: {"output": [4]}, 3: {}})
    rows = rows_with(4, flags=[NEEDS_PENALTIES, 0, HAS_BAD_WORDS, NEEDS_PENALTIES])
    state = count_tokens(
        state, ints(0, 1, 2, 3), ints(4, 5, 6, 7), jnp.asarray([True, True, True, False]), rows
    )
    counts = np.asarray(state.token_counts)
    assert {tuple(at): int(counts[tuple(at)]) for at in np.argwhere(counts)} == {(0, 4): 2}
    assert np.asarray(state.history)[2].tolist() == [-1, -1, 6]
    assert np.asarray(state.history)[1].tolist() == [-1, -1, -1]


def test_counting_step_by_step_ends_where_setting_the_row_does():
    output = [3, 9, 3, 3, 12, 60]
    rows = rows_with(1, flags=[NEEDS_PENALTIES | HAS_BAD_WORDS])
    stepped = state_with({1: {"prompt": [1, 2]}})
    for token in output:
        stepped = count_tokens(stepped, ints(1), ints(token), jnp.asarray([True]), rows)
    at_once = state_with({1: {"prompt": [1, 2], "output": output}})
    for a, b in zip(jax.tree.leaves(stepped), jax.tree.leaves(at_once), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_counting_a_donated_state_copies_nothing_as_wide_as_the_vocabulary():
    vocab_size = 50_000
    state = jax.eval_shape(lambda: LogitsState.init(9, vocab_size))
    rows = jax.eval_shape(lambda: SamplingRows.init(8))
    row = jax.ShapeDtypeStruct((8,), jnp.int32)
    active = jax.ShapeDtypeStruct((8,), jnp.bool_)
    compiled = (
        jax.jit(count_tokens, donate_argnums=0).lower(state, row, row, active, rows).compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * 9 * vocab_size * 4
    assert memory.temp_size_in_bytes < vocab_size


def test_setting_a_row_replaces_what_an_earlier_request_left():
    state = state_with({1: {"prompt": [1], "output": [2], "allowed": [3], "bad_words": [[4, 5]]}})
    state = set_row(state, 1, logits_row(VOCAB, **SIZES))
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(state_with({})), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_making_a_row_asks_nothing_of_the_device():
    row = logits_row(VOCAB, prompt=[1], logit_bias={2: 1.0}, bad_words=[[3], [4, 5]], **SIZES)
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(row))


def test_biases_add_up_with_what_is_allowed_and_banned():
    values = {"allowed": [2, 3, 4], "logit_bias": {3: 1.5, 4: -2.0, 5: 9.0}, "bad_words": [[4]]}
    bias = logits_row(VOCAB, **values, **SIZES).logit_bias
    assert bias[[2, 3]].tolist() == [0.0, 1.5]
    assert np.isneginf(np.delete(bias, [2, 3])).all()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
        ("logit_bias", {"logit_bias": {1: 1.0, -1: 1.0}}),
        ("allowed_token_ids", {"allowed": [-1]}),
        ("bad_words", {"bad_words": [[VOCAB, 1]]}),
        ("bad_words", {"bad_words": [[1, 2, 3, 4, 5]]}),
        ("bad_words", {"bad_words": [[1, 2]] * 5}),
        ("prompt", {"prompt": [VOCAB]}),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field, values):
    with pytest.raises(InvalidRequestError) as error:
        logits_row(VOCAB, **values, **SIZES)
    assert error.value.field == field
