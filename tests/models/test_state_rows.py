"""Rows' recurrent states: convolutions and recurrences over ragged rows, however they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.models.blocks.state_rows import StateCopies, StateRows, causal_conv, recur

NUM_SLOTS, PADDED_ROWS, PADDED_TOKENS = 5, 6, 48
CHUNK = 8
LENGTHS = (1, 31, 8, 17)
"""Of the sequences, each in the slot of its number."""
NUM_SNAPSHOTS = 24
Snapshots = dict[tuple[int, int], int]
"""A sequence and a position in it -> the slot of a snapshot of the state there."""


def random_cuts(rng: np.random.Generator) -> list[dict[int, int]]:
    """Steps that compute all sequences: in each, tokens by sequence."""
    left, steps = dict(enumerate(LENGTHS)), []
    while left:
        chosen = [name for name in left if rng.random() < 0.7] or list(left)[:1]
        step: dict[int, int] = {}
        for name in chosen:
            room = PADDED_TOKENS - sum(step.values())
            step[name] = int(min(left[name], room, rng.choice([1, 1, 3, CHUNK, 20])))
        steps.append({name: count for name, count in step.items() if count})
        left = {
            name: count - step.get(name, 0)
            for name, count in left.items()
            if count > step.get(name, 0)
        }
    return steps


def run(
    steps: list[dict[int, int]],
    inputs: list[np.ndarray],
    part: Callable[..., Any],
    states: Any,
    *,
    restored: Snapshots | None = None,
    saved: Snapshots | None = None,
) -> tuple[list[np.ndarray], Any]:
    """Runs a part of a model in steps; each sequence's outputs, and the states in the end.

    Args:
        inputs: a sequence's, [length, ...].
        part: (x, states, rows) -> (out, states).
        restored: snapshots that sequences go on from, one each; the others begin.
        saved: takes the snapshots that are written wherever they can be; None writes none.
    """
    done, sources = [0] * len(inputs), dict[int, int]()
    for (name, position), source in (restored or {}).items():
        done[name], sources[name] = position, source
    outs: list[list[np.ndarray]] = [[] for _ in inputs]
    for step in steps:
        decodes = [
            name
            for name, count in step.items()
            if count == 1 and done[name] and name not in sources
        ]
        order = decodes + [name for name in step if name not in decodes]
        decode_only = len(decodes) == len(order)
        counts = [step[name] for name in order]
        num_tokens = PADDED_ROWS if decode_only else PADDED_TOKENS
        edges = np.concatenate([[0], np.cumsum(counts)])
        cu_q_lens = np.full(PADDED_ROWS + 1, edges[-1], np.int32)
        cu_q_lens[: len(edges)] = edges
        if decode_only:  # as in a step: every row has a token, padding too
            cu_q_lens = np.arange(PADDED_ROWS + 1, dtype=np.int32)
        token_row = np.zeros(num_tokens, np.int32)
        token_row[: edges[-1]] = np.repeat(np.arange(len(order)), counts)
        if decode_only:
            token_row = np.arange(PADDED_ROWS, dtype=np.int32)
        slot, start = np.full((2, PADDED_ROWS), NUM_SLOTS - 1, np.int32)  # the trash row
        slot[: len(order)] = order
        start[: len(order)] = [done[name] for name in order]
        x = np.full((num_tokens, *inputs[0].shape[1:]), 7.0, np.float32)
        parts = [inputs[name][done[name] : done[name] + step[name]] for name in order]
        x[: edges[-1]] = np.concatenate(parts)
        source, at, place = slot.copy(), *np.zeros((2, PADDED_ROWS, 2), np.int32)
        for index, name in enumerate(order):
            source[index] = sources.pop(name, slot[index])
            if saved is None or index < len(decodes):
                continue
            end = done[name] + step[name]
            due = [p for p in range(done[name] + 1, end + 1) if p % CHUNK == 0][-2:]
            for which, position in enumerate(due):
                at[index, which] = position
                place[index, which] = saved[name, position] = NUM_SLOTS + len(saved)
        rows = StateRows(
            copies=None
            if decode_only
            else StateCopies(
                source=jnp.asarray(source), save_at=jnp.asarray(at), save_slot=jnp.asarray(place)
            ),
            slot=jnp.asarray(slot),
            start=jnp.asarray(start),
            live=jnp.arange(PADDED_ROWS) < len(order),
            cu_q_lens=jnp.asarray(cu_q_lens),
            token_row=jnp.asarray(token_row),
            num_decode_rows=jnp.int32(len(decodes)),
            num_rows=jnp.int32(len(order)),
            decode_only=decode_only,
        )
        out, states = part(jnp.asarray(x), states, rows)
        for index, name in enumerate(order):
            outs[name].append(np.asarray(out[edges[index] : edges[index + 1]]))
            done[name] += step[name]
    none = np.zeros((0, *inputs[0].shape[1:]), np.float32)
    return [np.concatenate(each or [none]) for each in outs], states


WHOLE = [{0: 1, 1: 31, 2: 8}, {3: 17}]


def check_snapshots(inputs: list[np.ndarray], part: Callable[..., Any], left: Any) -> None:
    """Wherever a sequence goes on from a snapshot, what follows is as if it had never stopped."""
    whole, _ = run(WHOLE, inputs, part, left)
    room = jnp.concatenate([left, jnp.full((NUM_SNAPSHOTS, *left.shape[1:]), 5.0, jnp.float32)])
    for seed in range(6):
        rng, saved = np.random.default_rng(seed), Snapshots()
        _, states = run(random_cuts(rng), inputs, part, room, saved=saved)
        assert len(saved) >= 3
        for (name, position), slot in saved.items():
            num_left = LENGTHS[name] - position
            if num_left == 0:
                continue
            cut = int(rng.integers(1, num_left + 1))
            steps = [{name: count} for count in (cut, num_left - cut) if count]
            found, after = run(steps, inputs, part, states, restored={(name, position): slot})
            np.testing.assert_array_equal(found[name], whole[name][position:])
            np.testing.assert_array_equal(after[NUM_SLOTS:], states[NUM_SLOTS:])


def sequences(*shape: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal((length, *shape)).astype(np.float32) for length in LENGTHS]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("channels", [(6,), (2, 3)])
def test_a_convolution_is_the_same_however_sequences_are_cut(width, channels):
    rng = np.random.default_rng(2)
    taps = rng.standard_normal((*channels, width)).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32)
    inputs = sequences(*channels)
    expected = []
    for x in inputs:
        padded = np.concatenate([np.zeros((width - 1, *channels), np.float32), x])
        taken = [padded[tap : tap + len(x)] * taps[..., tap] for tap in range(width)]
        expected.append(sum(taken) + bias)

    @jax.jit
    def part(x: Any, states: Any, rows: StateRows) -> Any:
        return causal_conv(x, jnp.asarray(taps), jnp.asarray(bias), states, rows)

    def left() -> jax.Array:  # what others left in the slots
        return jnp.full((NUM_SLOTS, width - 1, *channels), 3.0, jnp.float32)

    whole, after = run(WHOLE, inputs, part, left())
    for found, wanted in zip(whole, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    for seed in range(6):
        found, states = run(random_cuts(np.random.default_rng(seed)), inputs, part, left())
        for one, other in zip(found, whole, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(states[:4], after[:4])
        np.testing.assert_array_equal(states[4], left()[4])  # padding wrote nothing
    check_snapshots(inputs, part, left())


def test_a_recurrence_visits_each_token_once_and_in_order():
    """A state that is multiplied and added to, which no other order or number of visits gives."""

    def one_token(inputs: Any, state: jax.Array) -> Any:
        state = 0.5 * state + inputs[0]
        return state, state

    def one_chunk(inputs: Any, counts: jax.Array, state: jax.Array) -> Any:
        outs = []
        for index in range(CHUNK):
            state = jnp.where(counts[index], 0.5 * state + inputs[0][index], state)
            outs.append(state)
        return jnp.stack(outs), state

    @jax.jit
    def part(x: Any, states: Any, rows: StateRows) -> Any:
        return recur((x,), states, rows, chunk_size=CHUNK, one_token=one_token, one_chunk=one_chunk)

    inputs = sequences(3)
    expected = []
    for x in inputs:
        state, outs = np.zeros(3, np.float32), []
        for token in x:
            state = np.float32(0.5) * state + token
            outs.append(state)
        expected.append(np.stack(outs))
    for seed in range(6):
        left = jnp.full((NUM_SLOTS, 3), 9.0, jnp.float32)
        found, states = run(random_cuts(np.random.default_rng(seed)), inputs, part, left)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(states[:4], np.stack([each[-1] for each in expected]))
        np.testing.assert_array_equal(states[4], left[4])
    check_snapshots(inputs, part, jnp.full((NUM_SLOTS, 3), 9.0, jnp.float32))
