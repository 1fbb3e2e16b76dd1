"""The table of ratios: Octavo against each peer, from one run of `run.py`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Result = dict[str, Any]

HEADER = (
    "peer",
    "requests",
    "output tok/s",
    "ratio",
    "total tok/s",
    "single tok/s",
    "ratio",
    "prefill tok/s",
    "ratio",
    "TTFT p50 / p99 ms",
    "TPOT p50 / p99 ms",
    "first token s",
    "settled s",
    "same outputs",
)


def table(runs: Mapping[str, Sequence[Result]], baseline: str) -> str:
    """A Markdown table, a row a peer and batch size; ratios are the baseline's rate over its own.

    Each figure is the median over a peer's runs; a ratio is of medians.

    Args:
        runs: peer's title -> its results, one a repeat.
        baseline: the title whose rates stand above the line of each ratio.
    """
    rows = [
        _row(title, batch, results, runs.get(baseline, ()))
        for title, results in runs.items()
        for batch in reversed(results[0]["batches"])
    ]
    lines = [HEADER, tuple("---" for _ in HEADER), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ratios(runs: Mapping[str, Sequence[Result]], baseline: str) -> list[dict[str, Any]]:
    """The same ratios as numbers: the baseline's median rate over each peer's, None if unknown."""
    base = runs.get(baseline, ())
    return [
        {
            "peer": title,
            "num_requests": int(batch),
            "output_tokens_per_s": _ratio(base, results, _in_batch(batch, "output_tokens_per_s")),
            "single_stream_tokens_per_s": _ratio(base, results, _top("single_stream_tokens_per_s")),
            "prefill_tokens_per_s": _ratio(base, results, _top("prefill_tokens_per_s")),
            "same_outputs": same_outputs(base, results, batch),
        }
        for title, results in runs.items()
        if title != baseline
        for batch in results[0]["batches"]
    ]


def same_outputs(base: Sequence[Result], results: Sequence[Result], batch: str) -> float | None:
    """Share of a batch's requests whose output tokens are all equal to the baseline's.

    Greedy tokens of two correct engines may part at a near tie, after which they differ for good;
    far below 1 means one of them is wrong.
    """
    if not base or batch not in base[0]["batches"]:
        return None
    ours = base[0]["batches"][batch]["outputs"]
    theirs = results[0]["batches"][batch]["outputs"]
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    return same.count(True) / len(same)


def _row(
    title: str, batch: str, results: Sequence[Result], base: Sequence[Result]
) -> tuple[str, ...]:
    output = _in_batch(batch, "output_tokens_per_s")
    single, prefill = _top("single_stream_tokens_per_s"), _top("prefill_tokens_per_s")
    same = same_outputs(base, results, batch)
    return (
        title,
        batch,
        _show(_median(results, output)),
        _show(_ratio(base, results, output), "×"),
        _show(_median(results, _in_batch(batch, "total_tokens_per_s"))),
        _show(_median(results, single)),
        _show(_ratio(base, results, single), "×"),
        _show(_median(results, prefill)),
        _show(_ratio(base, results, prefill), "×"),
        _percentiles(results, batch, "ttft_ms"),
        _percentiles(results, batch, "tpot_ms"),
        _show(_median(results, _top("start_to_first_token_s"))),
        _show(_median(results, _top("start_to_settled_s"))),
        "–" if same is None else f"{same:.0%}",
    )


def _top(key: str) -> Callable[[Result], float | None]:
    return lambda result: result.get(key)


def _in_batch(batch: str, key: str) -> Callable[[Result], float | None]:
    return lambda result: result["batches"].get(batch, {}).get(key)


def _median(results: Sequence[Result], read: Callable[[Result], float | None]) -> float | None:
    values = [value for result in results if (value := read(result)) is not None]
    return statistics.median(values) if values else None


def _ratio(
    base: Sequence[Result], results: Sequence[Result], read: Callable[[Result], float | None]
) -> float | None:
    over, under = _median(base, read), _median(results, read)
    return over / under if over is not None and under else None


def _percentiles(results: Sequence[Result], batch: str, key: str) -> str:
    def read(name: str) -> Callable[[Result], float | None]:
        return lambda result: (result["batches"][batch][key] or {}).get(name)

    low, high = _median(results, read("p50")), _median(results, read("p99"))
    return "–" if low is None or high is None else f"{low:.0f} / {high:.0f}"


def _show(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    if unit:
        return f"{value:.2f}{unit}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
