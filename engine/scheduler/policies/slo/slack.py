"""How long a step may take before a running row is late, and how many prompt tokens that buys."""

from __future__ import annotations

import math
from bisect import bisect_right
from heapq import heappop, heappush

import numpy as np

from octavo.engine.scheduler.deadlines import first_due_s, pace_s
from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.row_table import Floats
from octavo.engine.scheduler.step_time_model import StepFeatures

_FLOOR_STEPS = 2
"""Steps of the floor after which the better size must be within reach."""

_WORTH_BANKING = 1.05
"""How much more a second must buy for it to be waited for."""

_LENT_SHARE = 0.5
"""Of the slack that nine in ten outputs of a row's class bank until their end, how much prompts may
take before it is banked."""

_MOST_PACES = 6
"""Paces that are compared, of those that rows have: from the least to the largest."""

_MOST_PROMPTS = 32
"""Prompts whose due times are looked at for what rows cost them."""

_SHARE_OF_TARGET = 0.5
"""Most that a step may take of recent TTFT targets: a request that arrives as the step begins waits
for its end, and then for the end of a step as long."""


def smallest_slack_s(snapshot: Snapshot) -> float:
    """Seconds from the step's start in which it must end for every row's token to be in time.

    Rows that are late already count for nothing: a short step would not save them. Infinity if no
    row has a goal.
    """
    rows, decoding = snapshot.rows, snapshot.decoding
    if not len(decoding):
        return math.inf
    least_s = rows.least_due_s(decoding) - snapshot.starts_s
    if least_s > 0:
        return least_s
    due_s = rows.base_s[decoding.slots] + rows.pace_s(decoding)
    slack = due_s - np.array(snapshot.starts_s)
    return float(slack.min(0, initial=math.inf, where=slack > 0))


def end_pace_s(snapshot: Snapshot, floor: int) -> float:
    """Seconds a step in which every row whose end is due gets there in time.

    Rows that steps of the smallest size would not save count for nothing. Infinity if no row's end
    is due.

    Args:
        floor: prompt tokens of the smallest step.
    """
    rows, slots = snapshot.rows, snapshot.decoding.slots
    until_s = rows.end_due_s[slots] - snapshot.starts_s
    if float(until_s.min(0, initial=math.inf)) == math.inf:
        return math.inf
    emitted = snapshot.decoding.starts - rows.last_prompt[slots]
    every_s = until_s / np.maximum(rows.length[slots] - emitted, 1.0)
    counts = every_s >= _step_s(snapshot, floor)
    return float(every_s.min(0, initial=math.inf, where=counts))


def expected_slack_s(snapshot: Snapshot, floor: int) -> float:
    """As `smallest_slack_s`, but for whole outputs.

    A row banks slack with each token that takes less than its pace. What counts is the pace of the
    whole output, so that prompts that are due may take a share of the slack that is going to be
    banked. Other prompts take none of it, and spare rows that are late: such a row keeps its pace
    if each token to come takes as much less, unless that is less than the smallest step.

    Args:
        floor: prompt tokens of the smallest step.
    """
    slack_s = smallest_slack_s(snapshot)
    rows, decoding, slots = snapshot.rows, snapshot.decoding, snapshot.decoding.slots
    forecast, full = snapshot.forecast, snapshot.limits.max_num_batched_tokens
    if not len(decoding) or not forecast.is_sound:
        return slack_s
    least_s = rows.least_due_s(decoding) - snapshot.starts_s
    if _step_s(snapshot, full - len(decoding)) <= least_s:
        return slack_s  # as nearly always where steps are short
    goals_s, emitted = rows.tpot_s[slots], decoding.starts - rows.last_prompt[slots]
    banked_s = rows.base_s[slots] + rows.pace_s(decoding) - snapshot.starts_s
    is_late = banked_s <= 0
    to_come = np.maximum(rows.least_length[slots] - emitted, 0.0)
    lent_s = _LENT_SHARE * np.maximum(goals_s - forecast.step_s, 0.0) * to_come
    least_pace_s = least_pace_kept_s(snapshot, goals_s[~is_late])
    counts = ~is_late & ((goals_s >= least_pace_s) | (goals_s == 0))
    within_s = float((banked_s + lent_s).min(0, initial=math.inf, where=counts))
    every_s = goals_s + banked_s / np.maximum(rows.length[slots] - emitted, 1.0)
    is_lost = is_late & (every_s < _step_s(snapshot, floor))
    spared_s = np.where(is_late, every_s, banked_s).min(0, initial=math.inf, where=~is_lost)
    due_s = _step_s(snapshot, min(_due_tokens(snapshot), full))
    return min(within_s, max(float(spared_s), due_s))


def _due_tokens(snapshot: Snapshot) -> int:
    """Missing tokens of the prompts that are due some time."""
    columns, never = snapshot.waiting_columns, math.inf
    waiting = int(columns.work_tokens.sum(where=columns.due_s < never))
    return waiting + sum(
        [r.num_missing_tokens for r in snapshot.prefilling if first_due_s(r) < never]
    )


def least_pace_kept_s(snapshot: Snapshot, goals_s: Floats) -> float:
    """The least pace that is kept. Rows with a hastier one would cost more prompts their first
    token than there are such rows.

    A row's pace bounds the steps, and steps bound how much of prompts a second computes. All rows
    of a pace are given up together. A prompt that has a hastier pace itself counts as lost.

    Args:
        goals_s: paces of the rows that can be in time.

    Returns:
        0 if all paces are kept, infinity if none is.
    """
    paces_s = np.unique(goals_s[goals_s > 0])
    if not len(paces_s):
        return 0.0
    if len(paces_s) > _MOST_PACES:
        paces_s = paces_s[np.linspace(0, len(paces_s) - 1, _MOST_PACES).astype(np.intp)]
    forecast = snapshot.forecast
    requests = [*snapshot.prefilling, *snapshot.waiting[:_MOST_PROMPTS]]
    jobs = [
        (first_due_s(request) - snapshot.starts_s, request.num_missing_tokens, index)
        for index, request in enumerate(requests)
    ]
    jobs.sort()
    if not jobs or jobs[0][0] == math.inf:
        return 0.0
    own_s = [pace_s(request) or math.inf for request in requests]
    num_decode = len(snapshot.running) - len(snapshot.prefilling)
    context = snapshot.decoding.context or float(snapshot.rows.num_computed.sum())
    room = max(snapshot.limits.max_num_batched_tokens - num_decode, 1)
    model, before = forecast.step_time, forecast.mean_prefill_context
    best_s, fewest = 0.0, math.inf
    for step_s in (*paces_s.tolist(), math.inf):
        tokens = room
        if step_s < math.inf:
            tokens = model.prefill_tokens_within(step_s / model.safety, num_decode, context, before)
            tokens = max(1, min(tokens, room))
        token_s = _step_s(snapshot, tokens) / tokens
        late = _late_prompts(jobs, token_s)
        late.update(index for index, pace in enumerate(own_s) if pace < step_s)
        lost = len(late) + int(np.count_nonzero((goals_s > 0) & (goals_s < step_s)))
        if lost < fewest:
            best_s, fewest = step_s, lost
        if not late:
            break
    return best_s


def _late_prompts(jobs: list[tuple[float, int, int]], token_s: float) -> set[int]:
    """The prompts that are left out so that the most others are in time, as by `late_jobs`, for a
    few of them.

    Args:
        jobs: seconds until it is due, tokens and number of each; sorted.
        token_s: seconds a token.
    """
    kept: list[tuple[int, int]] = []  # a heap, the longest first
    late, num_tokens = set(), 0
    for due_s, tokens, number in jobs:
        heappush(kept, (-tokens, number))
        num_tokens += tokens
        if num_tokens * token_s > due_s:
            most, number = heappop(kept)
            num_tokens += most
            late.add(number)
    return late


def first_tokens_budget(snapshot: Snapshot, floor: int) -> int:
    """Tokens of the largest step for which its prompts, and the requests that arrive while it runs,
    meet their TTFT targets.

    All first tokens of a step come at its end, so that each prompt more delays all of them.
    Prompts join by due time as long as the step ends before the first of them is due. A prompt
    that is late anyway bounds nothing, nor does one that a later step completes. Requests to come
    do not split the first prompt if they would be due after it.

    Args:
        floor: as for `budget_within`.
    """
    limits, columns, starts_s = snapshot.limits, snapshot.waiting_columns, snapshot.starts_s
    most = limits.max_num_batched_tokens
    num_decode = len(snapshot.decoding)
    room = max(most - num_decode, 1)
    full_s = _step_s(snapshot, room)
    target_s = snapshot.forecast.ttft_targets.low or math.inf
    bound_s, whole = _SHARE_OF_TARGET * target_s, 0
    prompts = [(first_due_s(r), r.num_missing_tokens) for r in snapshot.prefilling]
    least_due_s = min([columns.least_due_s, *(due_s for due_s, _ in prompts)])
    if full_s <= min(bound_s, least_due_s - starts_s):
        return most  # as nearly always where steps are short
    first = limits.max_prefill_rows
    if not _may_await(snapshot, first):
        dues_s, work = columns.due_s[:first].tolist(), columns.work_tokens[:first].tolist()
        prompts += zip(dues_s, map(int, work), strict=True)
    if not prompts:
        return most
    prompts.sort()
    least_due_s, missing = prompts[0]
    if bound_s < full_s and least_due_s <= starts_s + target_s:
        whole = min(missing, room)
        bound_s = max(bound_s, _step_s(snapshot, whole))
    num_tokens = 0
    for due_s, missing in prompts:
        num_tokens += missing
        slack_s = due_s - starts_s
        if num_tokens > room or slack_s >= min(bound_s, full_s):
            break
        seconds = _step_s(snapshot, num_tokens)
        if seconds > bound_s:
            break
        if seconds <= slack_s:
            bound_s, whole = slack_s, num_tokens
    if full_s <= bound_s:
        return most
    return max(budget_within(snapshot, bound_s, floor), num_decode + whole)


def _step_s(snapshot: Snapshot, num_tokens: int) -> float:
    """Seconds that a step of so many prompt tokens beside the decode rows takes at the most."""
    forecast, num_decode = snapshot.forecast, len(snapshot.decoding)
    before_all = num_tokens * forecast.mean_prefill_context
    features = StepFeatures(num_decode, num_tokens, snapshot.decoding.context, before_all)
    return forecast.step_time.predict_s(features) * forecast.step_time.safety


def _may_await(snapshot: Snapshot, most: int) -> bool:
    """Whether the first waiting requests may need pages that this step computes for another prompt,
    a demoted one included."""
    if snapshot.num_awaiting:
        return True
    if not snapshot.demoted:
        return False
    return any(request.num_reusable_tokens for request in snapshot.waiting[:most])


def budget_within(snapshot: Snapshot, seconds: float, floor: int) -> int:
    """Tokens of the largest step that is expected to take at most `seconds`.

    Args:
        seconds: as promised to rows; the model's safety factor is applied here.
        floor: prompt tokens that are always let in, so that prompts advance whatever happens.
    """
    limits, model = snapshot.limits, snapshot.forecast.step_time
    num_decode = len(snapshot.decoding)
    most = limits.max_num_batched_tokens
    if seconds < math.inf:
        context = snapshot.decoding.context
        tokens = model.prefill_tokens_within(
            seconds / model.safety, num_decode, context, snapshot.forecast.mean_prefill_context
        )
        most = min(most, num_decode + max(tokens, floor))
    return max(edge_below(limits.token_edges, most), min(most, num_decode + floor))


def thrifty_budget(snapshot: Snapshot, seconds: float, floor: int) -> int:
    """As `budget_within`, but small chunks give way to a larger one that a little more slack buys.

    A step costs something however few prompt tokens it holds, so that seconds buy most tokens at
    some size of chunk. If that size is out of reach now, but not after a step or two of the floor,
    those come first: rows that decode faster than they need bank the slack that the larger chunk
    takes. Prompts that fit as they are do not wait for that.
    """
    budget = budget_within(snapshot, seconds, floor)
    if budget == snapshot.limits.max_num_batched_tokens:
        return budget  # no size is larger
    num_decode, forecast = len(snapshot.decoding), snapshot.forecast
    if not num_decode or seconds == math.inf:
        return budget
    model, edges = forecast.step_time, snapshot.limits.token_edges
    last = len(edges) - 1
    first = bisect_right(edges, num_decode + floor, 0, last)
    if first == last:
        return budget
    pending = snapshot.waiting_columns.total_work_tokens
    pending += sum([r.num_missing_tokens for r in snapshot.prefilling])
    if budget - num_decode >= pending:
        return budget
    context, before = snapshot.decoding.context, forecast.mean_prefill_context
    floor_s = model.predict_s(StepFeatures(num_decode, floor, context, floor * before))
    if floor_s >= seconds:
        return budget
    goal_s = snapshot.rows.tpot_s[snapshot.decoding.slots]
    goal_s = goal_s[goal_s > 0]
    if not len(goal_s):
        return budget
    banked_s = seconds + _FLOOR_STEPS * (float(np.min(goal_s)) - floor_s)
    now = bisect_right(edges, budget, 0, last) - 1
    best, best_gain, gain_now = now, 0.0, 0.0
    for index, step_s in enumerate(
        model.predict_edges_s(first, num_decode, context, before), first
    ):
        gain = (edges[index] - num_decode - floor) / max(step_s - floor_s, 1e-6)
        if index == now:
            gain_now = gain
        if gain > best_gain and step_s * model.safety <= banked_s:
            best, best_gain = index, gain
    if best > now and best_gain > _WORTH_BANKING * gain_now:
        return min(budget, num_decode + floor)
    return budget


def edge_below(token_edges: tuple[int, ...], num_tokens: int) -> int:
    """The largest bucket edge ≤ `num_tokens`; 0 if there is none."""
    index = bisect_right(token_edges, num_tokens)
    return token_edges[index - 1] if index else 0
