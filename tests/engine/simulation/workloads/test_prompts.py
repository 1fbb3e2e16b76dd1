"""Prompts: equal where segments are, in a simulation and for a model, and nowhere else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.prompts import (
    NUM_RESERVED_TOKENS,
    Segment,
    block_segments,
    salted,
    stream_of,
    stream_tokens,
)
from octavo.engine.simulation.workloads.traffic import Arrival, live_prompt, prompt_tokens

VOCAB_SIZE = 50_000

segments = st.lists(
    st.builds(Segment, st.integers(0, 2**48 - 1), st.integers(1, 40)),
    max_size=5,
    unique_by=lambda s: s[0],
).map(tuple)


def arrival(name: str, num_input: int, *parts: Segment) -> Arrival:
    return Arrival(
        request_id=name, arrival_s=0.0, num_input=num_input, num_output=1, segments=parts
    )


def shared(a: list[int], b: list[int]) -> int:
    return sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    )


@given(parts=segments, own=st.integers(0, 30))
def test_prompts_share_their_segments_and_nothing_behind(
    parts: tuple[Segment, ...], own: int
) -> None:
    length = sum(num for _, num in parts)
    first = arrival("a", max(1, length + own), *parts)
    second = arrival("b", max(1, length + own + 1), *parts)
    simulated = prompt_tokens(first, 0), prompt_tokens(second, 1)
    live = live_prompt(first, VOCAB_SIZE), live_prompt(second, VOCAB_SIZE)
    assert [len(simulated[0]), len(live[0])] == [first.num_input] * 2
    assert shared(*simulated) == length
    assert live[0][:length] == live[1][:length]
    # Behind it tokens are random: two may agree by chance, all do not.
    assert len(live[0]) - length < 4 or live[0][length:] != live[1][length : len(live[0])]


def test_a_longer_piece_of_a_stream_begins_like_a_shorter_one() -> None:
    short, long = (stream_tokens((Segment(7, n),), VOCAB_SIZE) for n in (100, 300))
    assert short == long[:100]
    assert stream_tokens((Segment(8, 100),), VOCAB_SIZE) != short


def test_tokens_are_plain_integers_of_the_vocabulary_spread_over_it() -> None:
    tokens = stream_tokens((Segment(1, 20_000),), 1000)
    assert {type(token) for token in tokens} == {int}
    counts = np.bincount(tokens, minlength=1000)
    assert not counts[:NUM_RESERVED_TOKENS].any()
    # 27 a token on average, Poisson: 6 deviations are 31.
    assert counts[NUM_RESERVED_TOKENS:].min() > 0
    assert counts.max() < 27 + 6 * 27**0.5
    with pytest.raises(InvalidConfigError, match="vocab_size = 256"):
        stream_tokens((), NUM_RESERVED_TOKENS)


def test_the_tokens_of_a_stream_stay_what_they_are() -> None:
    assert stream_of("session", 1, 2) == 103_657_826_537_582
    assert stream_tokens((Segment(3, 4),), 49_152) == [46_774, 34_062, 1_009, 11_382]


def test_runs_of_different_salts_share_nothing() -> None:
    request = arrival("a", 500, Segment(5, 400))
    prompts = [live_prompt(request, VOCAB_SIZE, salt) for salt in (0, 1, "0.5")]
    assert live_prompt(request, VOCAB_SIZE, 0) == prompts[0]
    for one, other in itertools.combinations(prompts, 2):
        # 500 tokens of some 49,744: hardly one agrees in place.
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 5
    first, second = salted((Segment(5, 4), Segment(6, 4)), "x"), salted((Segment(5, 9),), "x")
    assert first[0].stream == second[0].stream != 5


def test_blocks_are_cut_at_the_prompts_end() -> None:
    found = block_segments((1, 2, 3), 512, 600)
    assert [num for _, num in found] == [512, 88]
    assert found[0].stream == block_segments((1,), 16, 16)[0].stream
    assert block_segments((), 512, 600) == ()


def test_a_prompt_is_never_longer_than_it_says() -> None:
    request = arrival("a", 10, Segment(1, 30))
    assert len(prompt_tokens(request, 0)) == len(live_prompt(request, VOCAB_SIZE)) == 10
