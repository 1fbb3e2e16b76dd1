"""Workloads: lists of requests, made from a seed or read from a trace of real traffic.

A workload is a pure function of its arguments: one seed gives the same requests on every machine
and to every engine that is measured with it. Prompts are random token ids, so nothing but their
length (and a shared prefix, where asked for) can help or hurt an engine.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.engine.errors import InvalidConfigError

NUM_RESERVED_TOKENS = 256
"""Token ids below this are left out of random prompts: tokenizers keep specials and bytes there."""

Range = tuple[int, int]
"""An inclusive range of lengths in tokens."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload.

    Attributes:
        prompt_token_ids: the prompt.
        max_tokens: output tokens to generate, exactly (end of sequence is ignored).
        arrival_s: when it arrives, in seconds from the workload's start.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0


def parse_range(text: str, field: str = "range") -> Range:
    """Read `"16:256"` as (16, 256) and `"128"` as (128, 128); both ends are included.

    Raises:
        InvalidConfigError: not one or two integers, below 1, or out of order.
    """
    low, colon, high = text.partition(":")
    try:
        ends = (int(low), int(high if colon else low))
    except ValueError:
        ends = (0, 0)
    if not 1 <= ends[0] <= ends[1]:
        raise InvalidConfigError(
            field, text, "LOW:HIGH with 1 <= LOW <= HIGH, or one number, such as 16:256 or 128"
        )
    return ends


def random_workload(
    num_prompts: int,
    prompt_len: Range,
    output_len: Range,
    vocab_size: int,
    seed: int,
    shared_prefix_len: int = 0,
) -> list[BenchRequest]:
    """Requests with uniformly random lengths and token ids, all arriving at once.

    Args:
        num_prompts: how many requests.
        prompt_len: inclusive range of prompt lengths, the shared prefix included.
        output_len: inclusive range of output lengths.
        vocab_size: token ids are drawn from [NUM_RESERVED_TOKENS, vocab_size).
        seed: same seed, same requests; lengths do not depend on the prefix or the vocabulary.
        shared_prefix_len: tokens with which every prompt begins alike.

    Raises:
        InvalidConfigError: a count, a range, the vocabulary or the prefix that cannot be.
    """
    _at_least("num_prompts", num_prompts, 1)
    _at_least("seed", seed, 0)
    prompt_len = _checked_range("prompt_len", prompt_len)
    output_len = _checked_range("output_len", output_len)
    if not 0 <= shared_prefix_len <= prompt_len[0]:
        raise InvalidConfigError(
            "shared_prefix_len",
            shared_prefix_len,
            f"0 to the shortest prompt ({prompt_len[0]} tokens), which it is part of",
        )
    rng = np.random.default_rng(seed)
    prompt_lens = rng.integers(prompt_len[0], prompt_len[1], size=num_prompts, endpoint=True)
    output_lens = rng.integers(output_len[0], output_len[1], size=num_prompts, endpoint=True)
    prefix = _random_tokens(rng, shared_prefix_len, vocab_size)
    return [
        BenchRequest(
            prefix + _random_tokens(rng, int(num_prompt) - len(prefix), vocab_size), int(num_output)
        )
        for num_prompt, num_output in zip(prompt_lens, output_lens, strict=True)
    ]


def trace_workload(
    path: str | Path, num_prompts: int, seed: int, vocab_size: int, max_model_len: int
) -> list[BenchRequest]:
    """Requests with the lengths (and arrivals) of a trace and random token ids.

    A trace with arrivals gives one contiguous stretch of its rows at a seeded place, so that its
    bursts stay as they were, and its clock starts at that stretch's first row. A trace of lengths
    alone gives rows drawn without replacement, all arriving at once. Rows that do not fit
    `max_model_len` are left out, never shortened.

    Args:
        path: CSV with a header naming input_tokens, output_tokens and, optionally, arrival_s.
        num_prompts: how many requests.
        seed: picks the rows and the token ids.
        vocab_size: as for `random_workload`.
        max_model_len: most tokens of prompt and output together.

    Raises:
        InvalidConfigError: the file cannot be read, lacks a column, holds a bad row, or has fewer
            than `num_prompts` rows that fit.
    """
    _at_least("num_prompts", num_prompts, 1)
    _at_least("seed", seed, 0)
    rows = [row for row in read_trace(Path(path)) if row[1] + row[2] <= max_model_len]
    if len(rows) < num_prompts:
        raise InvalidConfigError(
            "num_prompts",
            num_prompts,
            f"at most {len(rows)}: the rows of {path} that fit {max_model_len} tokens",
        )
    rng = np.random.default_rng(seed)
    if rows[0][0] is None:
        picked = rng.choice(len(rows), size=num_prompts, replace=False)
        chosen = [rows[index] for index in picked]
    else:
        first = int(rng.integers(0, len(rows) - num_prompts, endpoint=True))
        chosen = rows[first : first + num_prompts]
    start_s = chosen[0][0] or 0.0
    requests = []
    for arrival_s, num_prompt, num_output in chosen:
        prompt = _random_tokens(rng, num_prompt, vocab_size)
        since_start_s = 0.0 if arrival_s is None else arrival_s - start_s
        requests.append(BenchRequest(prompt, num_output, since_start_s))
    return requests


def num_tokens(requests: Sequence[BenchRequest]) -> tuple[int, int]:
    """Prompt tokens and output tokens of a workload, summed."""
    return (
        sum(len(request.prompt_token_ids) for request in requests),
        sum(request.max_tokens for request in requests),
    )


def _random_tokens(rng: np.random.Generator, count: int, vocab_size: int) -> tuple[int, ...]:
    if vocab_size <= NUM_RESERVED_TOKENS:
        raise InvalidConfigError(
            "vocab_size", vocab_size, f"more than the {NUM_RESERVED_TOKENS} reserved ids"
        )
    return tuple(rng.integers(NUM_RESERVED_TOKENS, vocab_size, size=count).tolist())


def read_trace(path: Path) -> list[tuple[float | None, int, int]]:
    """(arrival_s or None, input tokens, output tokens) of each row, in arrival order."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            for column in ("input_tokens", "output_tokens"):
                if column not in columns:
                    raise InvalidConfigError(
                        "trace", path, f"a CSV with a column {column}; it has {columns}"
                    )
            rows = [_trace_row(path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidConfigError("trace", path, f"a readable CSV ({error})") from None
    if rows and rows[0][0] is not None:
        rows.sort(key=lambda row: row[0] or 0.0)
    return rows


def _trace_row(path: Path, line: int, row: dict[str, str | None]) -> tuple[float | None, int, int]:
    try:
        arrival = row.get("arrival_s")
        if "arrival_s" in row and arrival is None:
            raise ValueError("no arrival_s")
        arrival_s = None if arrival is None else float(arrival)
        num_input, num_output = int(row["input_tokens"] or ""), int(row["output_tokens"] or "")
        if num_input < 1 or num_output < 1 or not math.isfinite(arrival_s or 0.0):
            raise ValueError("a count below 1 or an arrival that is not finite")
    except ValueError as error:
        raise InvalidConfigError(
            "trace", path, f"line {line} must hold counts from 1 and finite seconds ({error})"
        ) from None
    return arrival_s, num_input, num_output


def _checked_range(field: str, ends: Range) -> Range:
    low, high = ends
    if not 1 <= low <= high:
        raise InvalidConfigError(field, f"{low}:{high}", "LOW:HIGH with 1 <= LOW <= HIGH")
    return ends


def _at_least(field: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidConfigError(field, value, f"an integer of at least {low}")
