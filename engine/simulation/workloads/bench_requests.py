"""Requests with the tokens of their prompts, as engines and servers are measured with.

They are a pure function of their arguments: one seed gives the same requests on every machine and
to every engine that is measured with them. Prompts are random token ids, so nothing but their
length (and shared prefixes, where asked for) can help or hurt an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.prompts import NUM_RESERVED_TOKENS
from octavo.engine.simulation.workloads.traces import read_trace
from octavo.engine.simulation.workloads.traffic import PLAIN, Arrival, TrafficClass, live_prompt

Range = tuple[int, int]
"""An inclusive range of lengths in tokens."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload.

    Attributes:
        prompt_token_ids: the prompt.
        max_tokens: output tokens to generate, exactly (end of sequence is ignored).
        arrival_s: when it arrives, in seconds from the workload's start.
        traffic_class: what it is promised.
    """

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrival_s: float = 0.0
    traffic_class: TrafficClass = PLAIN


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
    prompt_len = checked_range("prompt_len", prompt_len)
    output_len = checked_range("output_len", output_len)
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
        path: a trace or a table of lengths, as `read_trace` reads it.
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
    trace = read_trace(path)
    rows = [a for a in trace.arrivals if a.num_input + a.num_output <= max_model_len]
    if len(rows) < num_prompts:
        raise InvalidConfigError(
            "num_prompts",
            num_prompts,
            f"at most {len(rows)}: the rows of {path} that fit {max_model_len} tokens",
        )
    rng = np.random.default_rng(seed)
    if trace.has_times:
        first = int(rng.integers(0, len(rows) - num_prompts, endpoint=True))
        chosen = rows[first : first + num_prompts]
    else:
        chosen = [rows[i] for i in rng.choice(len(rows), size=num_prompts, replace=False)]
    start_s = chosen[0].arrival_s
    return [
        replace(request, arrival_s=request.arrival_s - start_s)
        for request in bench_requests(chosen, vocab_size, seed)
    ]


def bench_requests(
    arrivals: Iterable[Arrival], vocab_size: int, salt: object = 0
) -> list[BenchRequest]:
    """The requests of a workload with the tokens of their prompts.

    Args:
        arrivals: the workload.
        vocab_size: token ids are below it.
        salt: as for `live_prompt`.

    Raises:
        InvalidConfigError: as for `live_prompt`.
    """
    return [
        BenchRequest(
            tuple(live_prompt(arrival, vocab_size, salt)),
            arrival.num_output,
            arrival.arrival_s,
            arrival.traffic_class,
        )
        for arrival in arrivals
    ]


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


def checked_range(field: str, ends: Range) -> Range:
    low, high = ends
    if not 1 <= low <= high:
        raise InvalidConfigError(field, f"{low}:{high}", "LOW:HIGH with 1 <= LOW <= HIGH")
    return ends


def _at_least(field: str, value: int, low: int) -> None:
    if value < low:
        raise InvalidConfigError(field, value, f"an integer of at least {low}")
