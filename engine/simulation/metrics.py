"""Figures of a run, simulated or live: who was on time, how long things took, what was wasted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from octavo.engine.simulation.request_record import RequestRecord

PERCENTILES = (50, 90, 99)


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p90 and p99; None of nothing."""
    array = np.fromiter(values, np.float64)
    if not array.size:
        return None
    found = np.percentile(array, PERCENTILES).tolist()
    return {f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}


def attainment(records: Iterable[RequestRecord]) -> float:
    """Share of the offered requests that were on time; refused and failed ones were not."""
    counted = [record for record in records if record.is_counted]
    return sum(record.is_on_time for record in counted) / len(counted) if counted else 1.0


def jain_index(values: Sequence[float]) -> float:
    """How evenly something is shared: 1 is evenly, 1 / n is all to one.

    Source: Jain, Chiu, Hawe 1984.
    """
    array = np.asarray(values, np.float64)
    if not array.size or not array.any():
        return 1.0
    return float(array.sum() ** 2 / (array.size * (array**2).sum()))


def summarize(records: Sequence[RequestRecord], gaps_s: Iterable[float] = ()) -> dict[str, Any]:
    """Figures fit for JSON. Times in seconds, shares 0 to 1.

    Args:
        records: every offered request.
        gaps_s: waits between tokens, all requests together.
    """
    by_class: dict[str, list[RequestRecord]] = {}
    for record in records:
        by_class.setdefault(record.traffic_class.name, []).append(record)
    summary = _figures(records)
    summary["itl_s"] = percentiles(gaps_s)
    summary["jain_index"] = jain_index(_speeds(records))
    summary["classes"] = {name: _figures(by_class[name]) for name in sorted(by_class)}
    return summary


def merge_summaries(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One summary of several: means, or the largest of what is an extreme already.

    A figure that some lack is taken over those that have it.
    """
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for summary in summaries for name in summary):
        values = [s[name] for s in summaries if s.get(name) is not None]
        if not values:
            merged[name] = None
        elif isinstance(values[0], dict):
            merged[name] = merge_summaries(values)
        elif isinstance(values[0], bool):
            merged[name] = all(values)
        elif name.startswith(("worst_", "longest_", "max_", "lacked_")):
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged


def _figures(records: Sequence[RequestRecord]) -> dict[str, Any]:
    refused = [record for record in records if record.status == "rejected"]
    waits = [
        (record.first_token_s if record.first_token_s is not None else record.finished_s)
        for record in records
    ]
    return {
        "num_requests": len(records),
        "num_on_time": sum(record.is_on_time for record in records),
        "attainment": attainment(records),
        "num_served": sum(record.is_served for record in records),
        "num_refused": len(refused),
        "num_failed": sum(record.status == "failed" for record in records),
        "num_unfinished": sum(record.status == "unfinished" for record in records),
        "num_cancelled": sum(record.status == "cancelled" for record in records),
        "output_tokens": sum(record.num_output for record in records),
        "ttft_s": percentiles(r.ttft_s for r in records if r.ttft_s is not None),
        "tpot_s": percentiles(r.tpot_s for r in records if r.tpot_s is not None),
        "e2e_s": percentiles(r.e2e_s for r in records if r.e2e_s is not None),
        "worst_stall_s": max((record.max_stall_s for record in records), default=0.0),
        "time_to_refuse_s": percentiles(
            (record.finished_s or record.arrival_s) - record.arrival_s for record in refused
        ),
        "longest_wait_s": max(
            (
                wait - record.arrival_s
                for record, wait in zip(records, waits, strict=True)
                if wait is not None
            ),
            default=0.0,
        ),
        "num_preemptions": sum(record.num_preemptions for record in records),
        "max_preemptions": max((record.num_preemptions for record in records), default=0),
    }


def _speeds(records: Sequence[RequestRecord]) -> list[float]:
    """Tokens a second that each request got from arrival to end, refused ones 0.

    Prompt tokens count as well: a long prompt is much service.
    """
    speeds = []
    for record in records:
        if not record.is_counted:
            continue
        e2e_s = record.e2e_s
        tokens = record.num_input + record.num_output
        speeds.append(tokens / max(e2e_s, 1e-9) if e2e_s is not None else 0.0)
    return speeds
