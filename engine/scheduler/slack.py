"""How long a step may take before a running row is late, and how many prompt tokens that buys."""

from __future__ import annotations

import math

import numpy as np

from octavo.engine.scheduler.snapshot import Snapshot


def smallest_slack_s(snapshot: Snapshot) -> float:
    """Seconds from the step's start in which it must end for every row's token to be in time.

    Rows that are late already count for nothing: a short step would not save them. Infinity if no
    row has a goal.
    """
    slots = snapshot.decode_slots
    if not len(slots):
        return math.inf
    columns = snapshot.columns
    index = snapshot.decode_starts + 1 - columns.num_prompt[slots]
    slack = columns.base_s[slots] + columns.tpot_s[slots] * index - snapshot.starts_s
    slack = slack[slack > 0]
    return float(np.min(slack)) if len(slack) else math.inf


def budget_within(snapshot: Snapshot, seconds: float, floor: int) -> int:
    """Tokens of the largest step that is expected to take at most `seconds`.

    Args:
        seconds: as promised to rows; the model's safety factor is applied here.
        floor: prompt tokens that are always let in, so that prompts advance whatever happens.
    """
    limits, model = snapshot.limits, snapshot.forecast.step_time
    num_decode = len(snapshot.decode_slots)
    most = limits.max_num_batched_tokens
    if seconds < math.inf:
        context = float(snapshot.decode_starts.sum())
        tokens = model.prefill_tokens_within(
            seconds / model.safety, num_decode, context, snapshot.forecast.mean_prefill_context
        )
        most = min(most, num_decode + max(tokens, floor))
    return max(edge_below(limits.token_edges, most), min(most, num_decode + floor))


def edge_below(token_edges: tuple[int, ...], num_tokens: int) -> int:
    """The largest bucket edge ≤ `num_tokens`; 0 if there is none."""
    index = int(np.searchsorted(token_edges, num_tokens, side="right"))
    return token_edges[index - 1] if index else 0
