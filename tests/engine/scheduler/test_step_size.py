"""Chunks and decode iterations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.scheduler.decode_planner import MOST_DISPATCH_S, most_steps
from octavo.engine.scheduler.policy import MAX_STEPS_WHILE_WAITING, decode_steps
from octavo.engine.scheduler.prefill_planner import prefill_chunk


@pytest.mark.parametrize(
    ("start", "end", "budget", "expected"),
    [
        (0, 10, 16, 10),  # all of it
        (0, 10, 10, 10),
        (0, 40, 18, 16),  # to a page's end
        (6, 40, 18, 18),
        (6, 40, 20, 18),
        (0, 40, 5, 5),  # no page's end in reach
        (9, 40, 3, 3),
    ],
)
def test_chunks_end_at_a_page_if_they_can(start, end, budget, expected):
    assert prefill_chunk(start, end, budget, page_size=8) == expected


@given(st.integers(0, 99), st.integers(1, 99), st.integers(1, 99), st.sampled_from([1, 4, 16]))
def test_a_chunk_is_never_empty_and_never_over_budget(start, length, budget, page_size):
    chunk = prefill_chunk(start, start + length, budget, page_size)
    assert 1 <= chunk <= min(budget, length)


@given(st.integers(1, 32), st.integers(1, 99), st.integers(0, 98), st.booleans())
def test_steps_are_a_power_of_two_within_every_bound(limit, longest, less, someone_waits):
    shortest = max(1, longest - less)
    steps = decode_steps(
        limit=limit, longest=longest, shortest=shortest, someone_waits=someone_waits
    )
    assert steps >= 1
    assert steps & (steps - 1) == 0
    assert steps <= min(limit, longest)
    if someone_waits:
        assert steps <= min(shortest, MAX_STEPS_WHILE_WAITING)
    else:
        assert 2 * steps > min(limit, longest)


@given(st.floats(1e-6, 10.0))
def test_several_steps_take_no_longer_together_than_a_reader_may_wait(iteration_s):
    steps = most_steps(iteration_s)
    assert steps == 1 or steps * iteration_s <= MOST_DISPATCH_S
    assert (steps + 1) * iteration_s > MOST_DISPATCH_S
