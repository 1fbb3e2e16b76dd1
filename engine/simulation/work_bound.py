"""A bound on attainment that no scheduler exceeds, from the work that requests on time take.

A request on time has its prompt computed between its arrival and its first due time, and emits its
tokens before its last. In any stretch of time, the requests that arrive and fall due within it may
take more than the machine has: of its time, or of its pages. Then the largest of them at least are
late, so many that the rest fits. Disjoint stretches add up. Whatever else a scheduler is held to is
left out: paces between tokens, steps that are not full, pages that fall short at one moment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.step_time import StepTime, StepWork
from octavo.engine.simulation.workloads.traffic import Arrival

_NUM_BEGINS = 100
"""Arrivals at which stretches begin, at most."""

_NUM_LENGTHS = 30
"""Lengths of the stretches that begin at one of them."""

_LONG_CONTEXT = 100_000
"""Positions over which the cost of a row's context is taken."""

Floats = NDArray[np.float64]


def work_bound(
    arrivals: Sequence[Arrival],
    step_time: StepTime,
    limits: StepLimits,
    *,
    max_tokens: int | None = None,
    shares_prefixes: bool = False,
) -> float:
    """An upper bound on the share of requests with targets that are on time.

    Args:
        arrivals: the workload, lengths known.
        step_time: of the replica. The bound holds where a step's cost is linear, or linear up to
            a bucket's edge and beyond it, in its tokens, rows and contexts.
        limits: of the replica.
        max_tokens: every request's limit.
        shares_prefixes: whether the prefix cache is on: then what prompts share costs nothing, and
            takes no pages.

    Returns:
        A share from 0 to 1; 1 if nobody has a target.
    """
    jobs = [arrival for arrival in arrivals if _is_targeted(arrival)]
    if not jobs:
        return 1.0
    most = max_tokens or limits.max_model_len
    begin = np.array([a.arrival_s for a in jobs])
    prompts = np.array([a.num_input for a in jobs], np.float64)
    outputs = np.array(
        [max(1, min(a.num_output, most, limits.max_model_len - a.num_input)) for a in jobs],
        np.float64,
    )
    own = prompts.copy()
    if shares_prefixes:
        own -= [min(a.num_input, sum(n for _, n in a.segments)) for a in jobs]
    first_due, last_due = _due_times(jobs, outputs)

    # The first token comes of the prompt's last step; each further one takes an iteration.
    iterations = outputs - 1
    contexts = iterations * prompts + iterations * (iterations - 1) / 2
    shortest_s, context_s = _shortest_step_s(step_time, limits), _context_s(step_time, limits)
    pages = iterations * own + iterations * (iterations - 1) / 2
    # Pages are held for as long as steps take. So are rows, but the price of a token covers them.
    page_s = shortest_s * pages * limits.needs.num_whole / limits.page_size
    nothing = np.zeros(len(jobs))
    missed = [_fewest_missed(begin, first_due, last_due, nothing, page_s, limits.num_pages - 1)]
    for prompt_s, token_s in _prices(step_time, limits):
        prefill = prompt_s * own
        whole = prefill + token_s * iterations + context_s * contexts
        missed.append(_fewest_missed(begin, first_due, last_due, prefill, whole, 1.0))
    return 1.0 - max(missed) / len(jobs)


def _is_targeted(arrival: Arrival) -> bool:
    goals = arrival.traffic_class
    targets = (goals.ttft_target_s, goals.tpot_target_s, goals.e2e_target_s)
    return any(target is not None for target in targets)


def _due_times(jobs: Sequence[Arrival], outputs: Floats) -> tuple[Floats, Floats]:
    """When prompts, and when last tokens, are due at the latest; infinity where never."""
    first, last = [], []
    for job, num_output in zip(jobs, outputs, strict=True):
        goals = job.traffic_class
        end_s = np.inf if goals.e2e_target_s is None else goals.e2e_target_s
        first_s = np.inf if goals.ttft_target_s is None else goals.ttft_target_s
        if goals.tpot_target_s is not None:
            end_s = min(end_s, first_s + goals.tpot_target_s * (num_output - 1))
        first.append(job.arrival_s + min(first_s, end_s))
        last.append(job.arrival_s + end_s)
    return np.array(first), np.array(last)


def _grid(limits: StepLimits) -> list[tuple[int, int]]:
    """(prompt tokens, decode rows) of steps, the extreme ones among them."""
    rows = sorted({0, 1, *(limits.max_num_seqs * n // 8 for n in range(1, 9))})
    totals = {1, limits.max_num_batched_tokens}
    for edge in limits.token_edges:
        totals |= {edge, edge + 1}
    return [
        (total - num_rows, num_rows)
        for num_rows in rows
        for total in sorted({*totals, num_rows})
        if max(1, num_rows) <= total <= limits.max_num_batched_tokens
    ]


def _seconds(
    step_time: StepTime, limits: StepLimits, prompt: int, rows: int, context: int
) -> float:
    """Of an iteration of such a step, in the dispatch that makes it cheapest."""
    work = StepWork(rows, int(prompt > 0), prompt, context)
    seconds = step_time.seconds(work)
    if not prompt and limits.max_num_steps > 1:
        many = step_time.seconds(work._replace(num_steps=limits.max_num_steps))
        seconds = min(seconds, many / limits.max_num_steps)
    return seconds


def _shortest_step_s(step_time: StepTime, limits: StepLimits) -> float:
    return min(_seconds(step_time, limits, p, rows, 0) for p, rows in _grid(limits) if rows)


def _context_s(step_time: StepTime, limits: StepLimits) -> float:
    """Seconds for each position that a decode row attends to, where they are cheapest."""
    return max(
        0.0,
        min(
            _seconds(step_time, limits, prompt, rows, _LONG_CONTEXT)
            - _seconds(step_time, limits, prompt, rows, 0)
            for prompt, rows in _grid(limits)
            if rows
        )
        / _LONG_CONTEXT,
    )


def _prices(step_time: StepTime, limits: StepLimits) -> list[tuple[float, float]]:
    """Pairs of (seconds a prompt token, seconds a decode token) below the cost of every step.

    For each pair, no step is shorter than the prices of what is in it; so no schedule does work
    whose price is above the time it has. A higher price of prompts leaves less for decoding, as
    both share a step's fixed cost; each pair is a bound of its own.
    """
    costs = [(p, rows, _seconds(step_time, limits, p, rows, 0)) for p, rows in _grid(limits)]
    highest = min(seconds / p for p, rows, seconds in costs if p)
    pairs = []
    for share in np.linspace(0.0, 1.0, 11).tolist():
        prompt_s = share * highest
        token_s = min((seconds - prompt_s * p) / rows for p, rows, seconds in costs if rows)
        if token_s >= 0:
            pairs.append((prompt_s, token_s))
    return pairs


def _fewest_missed(
    arrival: Floats,
    first_due: Floats,
    last_due: Floats,
    first_size: Floats,
    whole_size: Floats,
    capacity: float,
) -> int:
    """A lower bound on late jobs, from disjoint overloaded stretches.

    Args:
        arrival, first_due, last_due: [jobs], seconds.
        first_size, whole_size: [jobs], what a job on time takes before its first and its last due.
        capacity: what there is a second.
    """
    order = np.argsort(arrival, kind="stable")
    arrival, first_due, last_due = arrival[order], first_due[order], last_due[order]
    first_size, whole_size = first_size[order], whole_size[order]
    dues = np.concatenate((first_due, last_due))
    horizon_s = float(np.max(dues[np.isfinite(dues)], initial=0.0))
    found: list[tuple[int, float, float]] = []
    for begin_s in arrival[:: max(1, len(arrival) // _NUM_BEGINS)].tolist():
        inside = slice(int(np.searchsorted(arrival, begin_s)), None)
        longest_s = max(2.0, horizon_s - begin_s)
        for length_s in np.geomspace(1.0, longest_s, _NUM_LENGTHS).tolist():
            end_s = begin_s + length_s
            size = np.where(last_due[inside] <= end_s, whole_size[inside], first_size[inside])
            size = size[first_due[inside] <= end_s]
            # Less what rounding may have added: a bound errs on the side of too many on time.
            excess = float(size.sum()) * (1 - 1e-9) - capacity * length_s
            if excess > 0:
                late = np.cumsum(np.sort(size)[::-1])
                found.append((int(np.searchsorted(late, excess)) + 1, begin_s, end_s))
    # Weighted interval scheduling: the disjoint stretches with the most late jobs in all.
    found.sort(key=lambda item: item[2])
    ends = [end_s for _, _, end_s in found]
    best = [0] * (len(found) + 1)
    for index, (count, begin_s, _) in enumerate(found):
        before = int(np.searchsorted(ends, begin_s, side="right"))
        best[index + 1] = max(best[index], best[min(before, index)] + count)
    return best[-1]
