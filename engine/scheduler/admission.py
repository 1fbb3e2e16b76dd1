"""Which waiting requests can still be in time, and which to give up so that the most are.

Source: Moore, "An n job, one machine sequencing algorithm for minimizing the number of late jobs",
Management Science 15(1), 1968 (with Hodgson).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.engine.kv.page_needs import PageNeeds
from octavo.engine.scheduler.waiting_columns import Floats

_ROUNDING = 1e-9
MAX_LEFT_OUT = 16
"""Jobs given up in one go; what is still late then is looked at again in the next plan."""


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


def peak_pages(contexts: Floats, remaining: Floats, needs: PageNeeds) -> float:
    """Most pages that rows will hold together if none joins and each emits what is expected.

    Every row grows by a token an iteration and gives all its pages back at its end, so the peak
    is just before some row's end. In a window, rows are taken to fill theirs all at once.

    Args:
        contexts: tokens each row holds now.
        remaining: tokens each will still emit.
    """
    if not len(contexts):
        return 0.0
    order = remaining.argsort()[::-1]
    left = remaining[order]
    held = np.cumsum(contexts[order])  # of this row and those that stay longer
    count = np.arange(1, len(order) + 1)
    whole = float(np.max((held + count * left) / needs.page_size + count))
    pages = needs.num_whole * whole
    for window in needs.windows:
        if window is not None:
            seen = np.minimum(contexts + remaining, window)
            pages += min(whole, float(seen.sum()) / needs.page_size + len(seen))
    return pages


def demand_s(
    remaining: NDArray[np.float64],
    contexts: Floats,
    *,
    step_s: float,
    num_rows: int,
    num_pages: int,
    needs: PageNeeds,
) -> Floats:
    """Seconds of the whole machine that decode rows still take: see `Forecast.demand_s`."""
    held = needs.mean_held_each(contexts + remaining)
    share = np.maximum(np.array(1.0 / num_rows), held / np.array(float(num_pages)))
    result: Floats = remaining * (np.array(step_s) * share)
    return result
