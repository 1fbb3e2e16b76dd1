"""Which waiting requests can still be in time, and which to give up so that the most are.

Source: Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs",
Management Science 15(1), 1968 (with Hodgson).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from octavo.engine.request import Request
from octavo.engine.scheduler.feasibility import is_hopeless, prefill_due_s
from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.waiting_columns import Floats

MAX_REJECTED = 32
"""Requests that one plan rejects; the others' turn comes with the next."""

_ROUNDING = 1e-9
"""More than what sums of seconds differ by in other orders, as a share."""

MAX_LEFT_OUT = 16
"""Jobs given up in one go; what is still late then is looked at again in the next plan."""


def hopeless_ones(snapshot: Snapshot) -> list[Request]:
    """Waiting requests, and running prompts, that can no longer be in time."""
    now_s, starts_s, forecast = snapshot.now_s, snapshot.starts_s, snapshot.forecast
    prompts = (*snapshot.prefilling, *snapshot.demoted)
    gone = [request for request in prompts if is_hopeless(request, now_s, forecast, starts_s)]
    waiting, columns = snapshot.waiting, snapshot.waiting_columns
    if columns.least_chance_s < starts_s:
        columns.tighten()
    if columns.least_chance_s >= starts_s:
        return gone
    passed = (columns.last_chance_s < starts_s).nonzero()[0]
    for index in passed[:MAX_REJECTED].tolist():
        if is_hopeless(waiting[index], now_s, forecast, starts_s):
            gone.append(waiting[index])
    return gone


def ones_to_leave_out(snapshot: Snapshot) -> list[Request]:
    """The requests to give up so that the most prompts are computed in time."""
    forecast, columns = snapshot.forecast, snapshot.waiting_columns
    prompts, token_s = snapshot.prefilling, forecast.prefill_token_s
    dues_s = [prefill_due_s(request, forecast) for request in prompts]
    missing = [request.num_missing_tokens for request in prompts]
    total_s = (columns.total_work_tokens + sum(missing)) * token_s
    end_s = snapshot.starts_s + total_s * (1 + _ROUNDING)
    if end_s > columns.least_due_s:
        columns.tighten()
    if end_s <= min(columns.least_due_s, *dues_s, math.inf):
        return []  # as nearly always: all of them are in time
    due_s, work_s = columns.due_s, columns.work_tokens * token_s
    if prompts:
        due_s = np.concatenate((due_s, dues_s))
        work_s = np.concatenate((work_s, [tokens * token_s for tokens in missing]))
    num_waiting = len(snapshot.waiting)
    return [
        snapshot.waiting[index] if index < num_waiting else prompts[index - num_waiting]
        for index in late_jobs(work_s, due_s, snapshot.starts_s, step_s=forecast.full_step_s)
    ]


def in_time_again(snapshot: Snapshot) -> list[Request]:
    """A demoted request that can be in time again beside all that are not demoted, if there is
    one: others are looked at in the plans to come."""
    columns, forecast = snapshot.waiting_columns, snapshot.forecast
    if not columns.num_demoted and not snapshot.demoted:
        return []
    token_s, now_s, starts_s = forecast.prefill_token_s, snapshot.now_s, snapshot.starts_s
    may_return = (columns.demoted_due_s < math.inf) & (columns.last_chance_s >= starts_s)
    left = [snapshot.waiting[index] for index in may_return.nonzero()[0].tolist()]
    left += [r for r in snapshot.demoted if not is_hopeless(r, now_s, forecast, starts_s)]
    if not left:
        return []

    def jobs(requests: Sequence[Request]) -> tuple[Floats, Floats]:
        missing = [request.num_missing_tokens for request in requests]
        return np.array(missing) * token_s, np.array([prefill_due_s(r, forecast) for r in requests])

    work_s, due_s = jobs(snapshot.prefilling)
    found = job_to_restore(
        np.concatenate((columns.work_tokens * token_s, work_s)),
        np.concatenate((columns.due_s, due_s)),
        # A job is done with the step that its last token is in: at most a full step later.
        starts_s + forecast.full_step_s,
        *jobs(left),
    )
    return [] if found is None else [left[found]]


def late_jobs(
    work_s: Floats,
    due_s: Floats,
    start_s: float,
    *,
    step_s: float = 0.0,
    most: int = MAX_LEFT_OUT,
) -> list[int]:
    """Jobs to leave out so that the most of the others are in time.

    Jobs run by due time. Whenever one would be late, the longest up to it is left out: that makes
    the most room for the least loss.

    Args:
        work_s: seconds each job takes.
        due_s: when each is due; infinity for jobs that cannot be late.
        start_s: when the first one begins.
        step_s: seconds of a full step: a job is done with the step that its last token is in, which
            other jobs fill up. 0 if jobs end one by one.
        most: jobs to leave out at the most.

    Returns:
        Indices, in the order in which they were left out.
    """
    if not len(due_s):
        return []
    if start_s + float(work_s.sum()) <= float(due_s.min(0)):
        return []
    # Stable: what an unstable sort makes of equal due times differs between processors.
    order = due_s.argsort(kind="stable")
    due_s, work_s = due_s[order], work_s[order]
    left_out: list[int] = []
    while len(left_out) < most:
        done_s = np.cumsum(work_s)
        if step_s:
            in_steps_s = np.ceil(done_s / step_s - _ROUNDING) * step_s
            done_s = np.minimum(in_steps_s, done_s[-1])
        late = start_s + done_s > due_s
        late[left_out] = False
        first = int(np.argmax(late))
        if not late[first]:
            break
        longest = int(np.argmax(work_s[: first + 1]))
        left_out.append(longest)
        work_s[longest] = 0.0
    return [int(order[index]) for index in left_out]


RESTORE_MARGIN = 1.25
"""How much longer all work may take when a job is taken in again. A job is left out as soon as
there is too much work by any amount, and taken in only when a quarter more would fit. So it is left
out again only if as much work arrives, or estimates grow by as much: a request that comes or
ends changes nothing by itself, and no job goes back and forth."""


def job_to_restore(
    work_s: Floats, due_s: Floats, start_s: float, left_work_s: Floats, left_due_s: Floats
) -> int | None:
    """The shortest job that was left out and would be in time again, with all others still in time
    as far as they are due after it. `late_jobs` would leave none of them out, `RESTORE_MARGIN` more
    work included.

    Args:
        work_s, due_s, start_s: as for `late_jobs`, of jobs that were not left out.
        left_work_s, left_due_s: of those that were.

    Returns:
        Its index, or None.
    """
    order = due_s.argsort(kind="stable")
    due_s = due_s[order]
    ends_s = start_s + RESTORE_MARGIN * np.cumsum(np.concatenate(([0.0], work_s[order])))
    least_s = np.minimum.accumulate(np.append(due_s - ends_s[1:], np.inf)[::-1])[::-1]
    before = due_s.searchsorted(left_due_s, "right")
    takes_s = RESTORE_MARGIN * left_work_s
    fits = (ends_s[before] + takes_s <= left_due_s) & (takes_s <= least_s[before])
    if not fits.any():
        return None
    return int(np.where(fits, left_work_s, np.inf).argmin(0))
