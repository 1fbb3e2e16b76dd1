"""Who is left out when not all can be in time, and how many pages rows come to hold."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from octavo.engine.scheduler.admission import late_jobs, peak_pages


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


def test_nobody_is_left_out_when_all_are_in_time():
    work, due = jobs((1, 1), (2, 3), (3, 6))
    assert late_jobs(work, due, 0.0) == []
    assert late_jobs(work, due, 0.5) == [0]


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
    assert peak_pages(np.array([20.0, 10.0]), np.array([2.0, 6.0]), 8) == pytest.approx(34 / 8 + 2)
    assert peak_pages(np.empty(0), np.empty(0), 8) == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_is_never_below_what_rows_come_to_hold(seed):
    rng = random.Random(seed)
    contexts = np.array([float(rng.randint(1, 60)) for _ in range(8)])
    remaining = np.array([float(rng.randint(1, 60)) for _ in range(8)])
    held = []
    for step in range(61):
        alive = remaining >= step
        held.append(np.ceil((contexts[alive] + step) / 4).sum())
    assert peak_pages(contexts, remaining, 4) >= max(held)
    assert peak_pages(contexts, remaining, 4) <= max(held) + 8
