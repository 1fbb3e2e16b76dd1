"""Clairvoyant upper bounds: how many requests any scheduler at all could serve on time.

The small machine of the textbook example: time in steps, every running row emits one token a step,
a row with prompt p that has emitted k tokens holds ceil((p + k + 1) / page) pages. A bound knows
every arrival and length beforehand, may swap for free, and relaxes only what it says; no schedule
beats it, so it is printed beside results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.engine.errors import InvalidConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request of the small machine, in steps and tokens.

    Attributes:
        arrival: first step it may run in.
        deadline: last step in which its last token is on time.
        prompt, output: tokens, ≥ 1.
    """

    arrival: int
    deadline: int
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Bound:
    """An upper bound on jobs done on time.

    Attributes:
        jobs: no schedule does more.
        is_tight: whether the solver proved that the relaxed problem's own best is `jobs`.
    """

    jobs: int
    is_tight: bool


def relaxed_bound(
    jobs: Sequence[Job],
    *,
    num_rows: int,
    num_pages: int,
    page_size: int,
    time_limit_s: float = 60.0,
    integral: bool = True,
) -> Bound:
    """An upper bound by a time-indexed program (HiGHS).

    A chosen job must emit `output` tokens within its window, at most one a step, and hold the pages
    of each token while it emits it; rows and pages hold in every step. Tokens for which a job holds
    equally many pages are one phase, and y[job, phase, step] is how much of a phase runs in a step,
    where the tokens before and after leave it room. Relaxed: a step's share of a job may be split,
    and phases keep their order only through those windows.

    Args:
        jobs: all of them.
        num_rows: running at once.
        num_pages: held at once.
        page_size: tokens.
        time_limit_s: of the solver; its best proven bound is returned then.
        integral: False relaxes the choice as well, which is quick and weaker.

    Raises:
        InvalidConfigError: scipy is not installed.

    Source: time-indexed formulations, e.g. Sousa and Wolsey 1992; HiGHS (Huangfu, Hall 2018).
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array
    except ImportError as error:
        raise InvalidConfigError("oracle", "scipy", "installed") from error

    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    low: list[float] = []
    high: list[float] = []

    def constrain(terms: Sequence[tuple[int, float]], least: float, most: float) -> None:
        index = len(low)
        for column, value in terms:
            rows.append(index)
            columns.append(column)
            values.append(value)
        low.append(least)
        high.append(most)

    num_columns = len(jobs)
    at_step: dict[int, list[tuple[int, int]]] = {}
    for index, job in enumerate(jobs):
        if job.arrival + job.output - 1 > job.deadline or _pages(job, job.output - 1, page_size) > (
            num_pages
        ):
            constrain([(index, 1.0)], 0.0, 0.0)
            continue
        steps = range(job.arrival, job.deadline + 1)
        phases = _phases(job, page_size)
        before = 0
        columns_of: list[dict[int, int]] = []
        for pages, length in phases:
            # Its first token has `before` steps before it, its last one the rest after.
            first = job.arrival + before
            last = job.deadline - (job.output - before - length)
            of_step: dict[int, int] = {}
            for step in steps:
                if first <= step <= last:
                    of_step[step] = num_columns
                    at_step.setdefault(step, []).append((num_columns, pages))
                    num_columns += 1
            columns_of.append(of_step)
            before += length
            constrain([(c, 1.0) for c in of_step.values()] + [(index, -float(length))], 0.0, 0.0)
        for step in steps:
            here = [(of_step[step], 1.0) for of_step in columns_of if step in of_step]
            if here:
                constrain([*here, (index, -1.0)], -np.inf, 0.0)
    for here_at in at_step.values():
        constrain([(column, 1.0) for column, _ in here_at], -np.inf, float(num_rows))
        constrain([(column, float(pages)) for column, pages in here_at], -np.inf, float(num_pages))

    objective = np.zeros(num_columns)
    objective[: len(jobs)] = -1.0
    integrality = np.zeros(num_columns)
    if integral:
        integrality[: len(jobs)] = 1
    matrix = coo_array((values, (rows, columns)), shape=(len(low), num_columns)).tocsr()
    result = milp(
        objective,
        constraints=LinearConstraint(matrix, np.array(low), np.array(high)),
        bounds=Bounds(0.0, 1.0),
        integrality=integrality,
        options={"time_limit": time_limit_s},
    )
    proven = result.fun if not integral else result.mip_dual_bound
    if proven is None or not np.isfinite(proven):
        return Bound(len(jobs), False)
    return Bound(int(np.floor(-proven + 1e-6)), result.status == 0)


def _pages(job: Job, emitted: int, page_size: int) -> int:
    return -(-(job.prompt + emitted + 1) // page_size)


def _phases(job: Job, page_size: int) -> list[tuple[int, int]]:
    """(pages held, tokens emitted while they are) in order."""
    phases: list[tuple[int, int]] = []
    for emitted in range(job.output):
        pages = _pages(job, emitted, page_size)
        if phases and phases[-1][0] == pages:
            phases[-1] = (pages, phases[-1][1] + 1)
        else:
            phases.append((pages, 1))
    return phases
