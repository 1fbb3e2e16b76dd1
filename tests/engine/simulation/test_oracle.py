"""Bounds: no schedule beats them, and small ones are what a person works out."""

from __future__ import annotations

import itertools
import random

import pytest

from octavo.engine.simulation.oracle import Job, relaxed_bound


def best_schedule(jobs: list[Job], num_rows: int, num_pages: int, page_size: int) -> int:
    """The most jobs on time, by trying every set at every step. Exponential: tiny cases only."""
    last = max(job.deadline for job in jobs)
    states = {tuple(0 for _ in jobs)}
    for step in range(last + 1):
        following = set()
        for state in states:
            ready = [
                i for i, job in enumerate(jobs)
                if job.arrival <= step <= job.deadline and state[i] < job.output
            ]  # fmt: skip
            for count in range(min(num_rows, len(ready)) + 1):
                for chosen in itertools.combinations(ready, count):
                    pages = sum(-(-(jobs[i].prompt + state[i] + 1) // page_size) for i in chosen)
                    if pages <= num_pages:
                        following.add(tuple(k + (i in chosen) for i, k in enumerate(state)))
        states = following
    return max(sum(k == j.output for k, j in zip(state, jobs, strict=True)) for state in states)


@pytest.mark.parametrize("integral", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_beats_the_bound(seed: int, integral: bool) -> None:
    rng = random.Random(seed)
    jobs = []
    for _ in range(4):
        arrival, output = rng.randint(0, 3), rng.randint(1, 4)
        jobs.append(
            Job(arrival=arrival, deadline=arrival + output + rng.randint(0, 2),
                prompt=rng.randint(1, 6), output=output)
        )  # fmt: skip
    best = best_schedule(jobs, 2, 4, 2)
    bound = relaxed_bound(jobs, num_rows=2, num_pages=4, page_size=2, integral=integral)
    assert best <= bound.jobs <= len(jobs)


def test_the_bound_counts_rows_pages_and_windows() -> None:
    def bound(jobs: list[Job], num_rows: int = 2, num_pages: int = 8) -> int:
        return relaxed_bound(jobs, num_rows=num_rows, num_pages=num_pages, page_size=4).jobs

    same = [Job(arrival=0, deadline=3, prompt=3, output=4)] * 5
    assert bound(same) == 2
    assert bound(same, num_rows=5) == 4
    assert bound(same, num_rows=5, num_pages=4) == 2
    assert bound([Job(arrival=0, deadline=2, prompt=3, output=4)]) == 0
    assert bound([Job(arrival=0, deadline=9, prompt=40, output=1)]) == 0
