"""Who is left out when not all can be in time, and how many pages rows come to hold."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from octavo.engine.kv.page_needs import PageNeeds
from octavo.engine.scheduler.forecast import peak_pages
from octavo.engine.scheduler.policies.slo.admission import RESTORE_MARGIN, job_to_restore, late_jobs


def jobs(*pairs):
    work, due = zip(*pairs, strict=True)
    return np.array(work, float), np.array(due, float)


def num_late(order, work, due):
    time, late = 0.0, 0
    for index in order:
        time += work[index]
        late += time > due[index]
    return late


def test_the_longest_up_to_the_first_late_one_is_left_out():
    # Done at 4, 5, 8 (late: due at 6); without the first: 1, 4.
    work, due = jobs((4, 5), (1, 5.5), (3, 6))
    assert late_jobs(work, due, 0.0) == [0]


def test_of_equal_jobs_the_first_is_left_out():
    # Enough of them that an unstable sort, as NumPy's default is on some processors, moves them.
    work, due = np.ones(64), np.repeat([40.0, 20.0], 32)
    assert late_jobs(work, due, 0.0, most=99) == [*range(32, 56)]


def test_nobody_is_left_out_when_all_are_in_time():
    work, due = jobs((1, 1), (2, 3), (3, 6))
    assert late_jobs(work, due, 0.0) == []
    assert late_jobs(work, due, 0.5) == [0]


def test_the_shortest_job_that_fits_with_a_margin_is_restored():
    work, due = jobs((1, 10), (2, 20))
    # Of the three, 5 ends too late, and before job 0 the job of 8 would make that late.
    assert job_to_restore(work, due, 0.0, *jobs((5, 5), (8, 9.5), (4, 30))) == 2
    assert job_to_restore(work, due, 0.0, *jobs((8, 9.5))) is None
    # 4 + 3 tokens' work ends at 7 and fits; with the margin it ends at 8.75.
    assert job_to_restore(work, due, 0.0, *jobs((4, 8))) == 0
    assert job_to_restore(*jobs((3, 4)), 0.0, *jobs((4, 8))) is None
    assert job_to_restore(*jobs((3, 4)), 0.0, *jobs((4, 8.75))) == 0
    assert job_to_restore(np.empty(0), np.empty(0), 0.0, *jobs((1, 2))) == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_restored_job_is_not_left_out_at_once(seed):
    rng = np.random.default_rng(seed)
    work, due = rng.random(12), np.sort(rng.random(12)) * 12
    gone = late_jobs(work, due, 0.0, most=99)
    kept = np.array([index for index in range(12) if index not in gone])
    left_work, left_due = rng.random(9) * 3, rng.random(9) * 20
    found = job_to_restore(work[kept], due[kept], 0.0, left_work, left_due)
    fitting = []
    for at in range(9):
        all_work = RESTORE_MARGIN * np.append(work[kept], left_work[at])
        all_due = np.append(due[kept], left_due[at])
        # Jobs due before it are what they were without it, with a margin or none.
        own_and_later = np.where(all_due >= left_due[at], all_due, np.inf)
        order = all_due.argsort()
        ends = np.empty(len(order))
        ends[order] = np.cumsum(all_work[order])
        if (ends <= own_and_later).all():
            fitting.append(at)
            late = late_jobs(np.append(work[kept], left_work[at]), all_due, 0.0)
            assert late == []
    assert found == min(fitting, key=lambda at: left_work[at], default=None)


@pytest.mark.parametrize("seed", range(20))
def test_a_job_restored_a_step_early_is_not_left_out_where_steps_are_whole(seed):
    rng = np.random.default_rng(seed)
    step_s = 0.7
    work, due = rng.random(8), np.sort(rng.random(8)) * 12
    gone = late_jobs(work, due, 0.0, step_s=step_s, most=99)
    kept = np.array([index for index in range(8) if index not in gone])
    left_work, left_due = rng.random(30) * 2, rng.random(30) * 12
    found = job_to_restore(work[kept], due[kept], step_s, left_work, left_due)
    if found is not None:
        all_work = np.append(work[kept], left_work[found])
        all_due = np.append(due[kept], left_due[found])
        assert late_jobs(all_work, all_due, 0.0, step_s=step_s) == []


def test_jobs_that_cannot_be_late_are_in_nobodys_way():
    work, due = jobs((100, np.inf), (1, 2))
    assert late_jobs(work, due, 0.5) == []


def test_no_jobs():
    assert late_jobs(np.empty(0), np.empty(0), 0.0) == []


@pytest.mark.parametrize("seed", range(30))
def test_no_other_choice_would_let_more_be_in_time(seed):
    rng = random.Random(seed)
    work, due = jobs(*((rng.randint(1, 9), rng.randint(3, 25)) for _ in range(6)))
    left_out = late_jobs(work, due, 0.0)
    kept = [index for index in np.argsort(due).tolist() if index not in left_out]
    assert num_late(kept, work, due) == 0
    best = min(num_late(order, work, due) for order in itertools.permutations(range(6)))
    assert len(left_out) == best


def test_pages_at_their_peak_by_hand():
    # 20 tokens and 2 to come, 10 and 6 to come, 8 a page: before the first ends (22 + 12) / 8 and
    # a page of rounding each; after it 16 / 8 and one.
    assert peak_pages(np.array([20.0, 10.0]), np.array([2.0, 6.0]), PageNeeds(8)) == pytest.approx(
        34 / 8 + 2
    )
    assert peak_pages(np.empty(0), np.empty(0), PageNeeds(8)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_never_below_what_rows_come_to_hold(seed):
    rng = random.Random(seed)
    contexts = np.array([float(rng.randint(1, 60)) for _ in range(8)])
    remaining = np.array([float(rng.randint(1, 60)) for _ in range(8)])
    held = []
    for step in range(61):
        alive = remaining >= step
        held.append(np.ceil((contexts[alive] + step) / 4).sum())
    assert peak_pages(contexts, remaining, PageNeeds(4)) >= max(held)
    assert peak_pages(contexts, remaining, PageNeeds(4)) <= max(held) + 8
