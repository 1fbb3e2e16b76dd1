"""Workloads: the same from one seed, within their ranges, and refused with a reason when bad."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.bench_requests import (
    NUM_RESERVED_TOKENS,
    num_tokens,
    parse_range,
    random_workload,
    trace_workload,
)

VOCAB_SIZE = 1000


def lengths(requests: list) -> list[tuple[int, int]]:
    return [(len(request.prompt_token_ids), request.max_tokens) for request in requests]


def write_trace(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text)
    return path


@given(low=st.integers(1, 10**6), span=st.integers(0, 10**6))
def test_a_range_is_read_back(low: int, span: int) -> None:
    assert parse_range(f"{low}:{low + span}") == (low, low + span)
    assert parse_range(str(low)) == (low, low)


@pytest.mark.parametrize("text", ["", ":", "1:", ":2", "a:b", "1:2:3", "1.5:2", "0:4", "-1", "9:8"])
def test_a_bad_range_names_the_field_and_the_value(text: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        parse_range(text, "prompt_len")
    assert caught.value.field == "prompt_len"
    assert caught.value.value == text


@given(
    num_prompts=st.integers(1, 20),
    seed=st.integers(0, 2**31),
    prompt_low=st.integers(1, 40),
    output_low=st.integers(1, 40),
    span=st.integers(0, 40),
    prefix_share=st.floats(0, 1),
)
def test_random_requests_keep_to_their_ranges_and_their_seed(
    num_prompts: int, seed: int, prompt_low: int, output_low: int, span: int, prefix_share: float
) -> None:
    prefix_len = int(prefix_share * prompt_low)
    arguments = (
        num_prompts,
        (prompt_low, prompt_low + span),
        (output_low, output_low + span),
        VOCAB_SIZE,
        seed,
        prefix_len,
    )
    requests = random_workload(*arguments)
    assert requests == random_workload(*arguments)
    assert len(requests) == num_prompts
    prefix = requests[0].prompt_token_ids[:prefix_len]
    for request in requests:
        assert prompt_low <= len(request.prompt_token_ids) <= prompt_low + span
        assert output_low <= request.max_tokens <= output_low + span
        assert all(NUM_RESERVED_TOKENS <= token < VOCAB_SIZE for token in request.prompt_token_ids)
        assert request.prompt_token_ids[:prefix_len] == prefix
        assert request.arrival_s == 0


def test_lengths_do_not_depend_on_prefix_or_vocabulary() -> None:
    plain = random_workload(16, (16, 64), (1, 9), VOCAB_SIZE, seed=3)
    prefixed = random_workload(16, (16, 64), (1, 9), 50_000, seed=3, shared_prefix_len=16)
    assert lengths(plain) == lengths(prefixed)


def test_another_seed_gives_other_requests() -> None:
    first, second = (random_workload(8, (16, 64), (1, 9), VOCAB_SIZE, seed) for seed in (1, 2))
    assert lengths(first) != lengths(second)


def test_the_published_workload_stays_what_it_was() -> None:
    requests = random_workload(128, (16, 256), (16, 128), 49_152, seed=1)
    assert num_tokens(requests) == (17_892, 9_216)


def test_prompts_hold_plain_integers() -> None:
    (request,) = random_workload(1, (4, 4), (2, 2), VOCAB_SIZE, seed=0)
    assert {type(token) for token in request.prompt_token_ids} == {int}
    assert type(request.max_tokens) is int


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("num_prompts", {"num_prompts": 0}),
        ("seed", {"seed": -1}),
        ("prompt_len", {"prompt_len": (5, 4)}),
        ("output_len", {"output_len": (0, 4)}),
        ("vocab_size", {"vocab_size": NUM_RESERVED_TOKENS}),
        ("shared_prefix_len", {"shared_prefix_len": 5}),
        ("shared_prefix_len", {"shared_prefix_len": -1}),
    ],
)
def test_a_bad_argument_is_refused_by_name(field: str, changes: dict) -> None:
    arguments = {
        "num_prompts": 2,
        "prompt_len": (4, 8),
        "output_len": (1, 2),
        "vocab_size": VOCAB_SIZE,
        "seed": 0,
    }
    with pytest.raises(InvalidConfigError) as caught:
        random_workload(**{**arguments, **changes})
    assert caught.value.field == field


def test_a_trace_with_arrivals_gives_a_contiguous_stretch_from_second_zero(tmp_path: Path) -> None:
    rows = [(10 + 1.5 * index, 5 + index, 1 + index) for index in range(20)]
    text = "arrival_s,input_tokens,output_tokens\n" + "\n".join(
        ",".join(map(str, row)) for row in rows
    )
    requests = trace_workload(write_trace(tmp_path, text), 6, 4, VOCAB_SIZE, 1000)
    first = requests[0].max_tokens - 1
    assert lengths(requests) == [row[1:] for row in rows[first : first + 6]]
    assert [request.arrival_s for request in requests] == [1.5 * index for index in range(6)]
    offsets = {
        trace_workload(tmp_path / "trace.csv", 6, seed, VOCAB_SIZE, 1000)[0].max_tokens
        for seed in range(10)
    }
    assert len(offsets) > 1


def test_a_trace_out_of_order_is_put_in_order(tmp_path: Path) -> None:
    path = write_trace(tmp_path, "arrival_s,input_tokens,output_tokens\n7,3,3\n5,1,1\n6.5,2,2\n")
    requests = trace_workload(path, 3, 0, VOCAB_SIZE, 100)
    assert [(r.max_tokens, r.arrival_s) for r in requests] == [(1, 0.0), (2, 1.5), (3, 2.0)]


def test_a_trace_of_lengths_gives_different_rows_all_at_once(tmp_path: Path) -> None:
    rows = [(5 + index, 1 + index) for index in range(20)]
    text = "input_tokens,output_tokens\n" + "\n".join(f"{i},{o}" for i, o in rows)
    path = write_trace(tmp_path, text)
    requests = trace_workload(path, 10, 4, VOCAB_SIZE, 1000)
    assert requests == trace_workload(path, 10, 4, VOCAB_SIZE, 1000)
    assert len(set(lengths(requests))) == 10
    assert set(lengths(requests)) <= set(rows)
    assert {request.arrival_s for request in requests} == {0.0}


def test_rows_that_do_not_fit_are_left_out_and_never_shortened(tmp_path: Path) -> None:
    path = write_trace(tmp_path, "input_tokens,output_tokens\n10,5\n10,6\n9,7\n2,2\n")
    requests = trace_workload(path, 2, 0, VOCAB_SIZE, max_model_len=15)
    assert sorted(lengths(requests)) == [(2, 2), (10, 5)]
    with pytest.raises(InvalidConfigError, match="at most 2"):
        trace_workload(path, 3, 0, VOCAB_SIZE, max_model_len=15)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("input_tokens\n5\n", "column output_tokens"),
        ("", "column input_tokens"),
        ("input_tokens,output_tokens\n5,x\n", "line 2"),
        ("input_tokens,output_tokens\n5,5\n5\n", "line 3"),
        ("input_tokens,output_tokens\n0,5\n", "line 2"),
        ("arrival_s,input_tokens,output_tokens\nnan,5,5\n", "line 2"),
        ("arrival_s,input_tokens,output_tokens\n,5,5\n", "line 2"),
    ],
)
def test_a_bad_trace_names_the_file_and_the_place(tmp_path: Path, text: str, hint: str) -> None:
    path = write_trace(tmp_path, text)
    with pytest.raises(InvalidConfigError, match=hint) as caught:
        trace_workload(path, 1, 0, VOCAB_SIZE, 100)
    assert str(path)[:20] in str(caught.value)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="readable"):
        trace_workload(tmp_path / "none.csv", 1, 0, VOCAB_SIZE, 100)


def test_tokens_of_a_trace_come_from_the_vocabulary(tmp_path: Path) -> None:
    path = write_trace(tmp_path, "input_tokens,output_tokens\n500,5\n")
    (request,) = trace_workload(path, 1, 0, 300, 1000)
    tokens = np.array(request.prompt_token_ids)
    assert tokens.min() >= NUM_RESERVED_TOKENS
    assert tokens.max() < 300
