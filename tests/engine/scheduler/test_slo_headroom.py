"""`slo` says quickly how much room it could want at the most, and exactly how much it wants."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.length_estimator import LengthEstimator
from octavo.engine.scheduler.policies import get_policy
from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.row_table import RowTable
from octavo.engine.scheduler.rows import NO_ROWS
from octavo.engine.scheduler.step_time_model import StepTimeModel

NUM_ROWS = 12


def running_rows(fakes, rng):
    """Decode rows of random lengths, some of which have come further than was expected."""
    limits = dataclasses.replace(fakes.limits(), max_num_seqs=NUM_ROWS, num_host_pages=0)
    num_rows = rng.randint(1, NUM_ROWS)
    slots = np.array(rng.sample(range(NUM_ROWS), num_rows), np.intp)
    rows = RowTable(NUM_ROWS, limits.page_size)
    rows.last_prompt[slots] = [rng.randint(0, 40) for _ in slots]
    rows.length[slots] = [rng.choice((0, 1, 5, 50, 500)) for _ in slots]
    rows.most_length = float(rows.length.max())
    emitted = [rng.randint(1, 60) for _ in slots]
    starts = (rows.last_prompt[slots] + emitted).astype(np.int32)
    running = tuple(fakes.request(f"r{index}") for index in range(num_rows))
    return Snapshot(
        now_s=0.0,
        waiting=(),
        running=running,
        num_available_pages=0,
        limits=limits,
        forecast=Forecast(
            limits=limits,
            # Prompts so slow that nobody comes back for nothing.
            step_time=StepTimeModel(limits.token_edges, prefill_token_s=10.0),
            lengths=LengthEstimator(limits.max_model_len),
        ),
        rows=rows,
        decoding=dataclasses.replace(
            NO_ROWS,
            requests=running,
            slots=slots,
            starts=starts,
            context=float(starts.sum()),
        ),
    )


@pytest.mark.parametrize("seed", range(4))
def test_it_never_wants_more_than_it_said_it_could(fakes, seed):
    rng, policy = random.Random(seed), get_policy("slo")
    wanted = []
    for _ in range(100):
        snapshot = running_rows(fakes, rng)
        request = fakes.request("new")
        request.metrics.num_preemptions = rng.choice((0, 0, 1, 2, 3))
        wanted.append(policy.headroom(snapshot, request))
        own_pages = request.max_tokens / snapshot.limits.page_size
        assert wanted[-1] <= policy.most_headroom(snapshot) + own_pages
    assert max(wanted) > 8
