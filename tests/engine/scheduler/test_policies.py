"""Policies are pure: a snapshot in, a decision out."""

from __future__ import annotations

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.request import Priority
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.length_estimator import LengthEstimator
from octavo.engine.scheduler.policies import get_policy
from octavo.engine.scheduler.row_columns import RowColumns
from octavo.engine.scheduler.snapshot import Snapshot
from octavo.engine.scheduler.step_time_model import StepTimeModel


@pytest.fixture
def snapshot(fakes):
    def request(name, arrival_s, priority):
        return fakes.request(name, arrival_s=arrival_s, priority=priority)

    limits = fakes.limits()
    return Snapshot(
        now_s=9.0,
        waiting=(
            request("w2", 2.0, Priority.LOW),
            request("w1", 1.0, Priority.NORMAL),
            request("w3", 3.0, Priority.REALTIME),
        ),
        running=(
            request("r0", 0.0, Priority.LOW),
            request("r5", 5.0, Priority.HIGH),
            request("r5b", 5.0, Priority.HIGH),
        ),
        num_available_pages=0,
        limits=limits,
        forecast=Forecast(
            limits=limits,
            step_time=StepTimeModel(limits.token_edges),
            lengths=LengthEstimator(limits.max_model_len),
        ),
        columns=RowColumns(limits.max_num_seqs),
    )


def names(requests):
    return [request.request_id for request in requests]


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", ["w1", "w2", "w3"]), ("priority", ["w3", "w1", "w2"])]
)
def test_order(snapshot, policy, expected):
    place = get_policy(policy).place
    ordered = sorted(snapshot.waiting, key=lambda request: place(request, snapshot.forecast))
    assert names(ordered) == expected


@pytest.mark.parametrize(
    ("policy", "beneficiary", "expected"),
    [
        ("fcfs", 0, ["r5b", "r5", "r0"]),
        ("fcfs", 1, ["r5b", "r5"]),
        ("fcfs", 2, ["r5b"]),
        ("priority", 0, ["r0"]),
        ("priority", 1, ["r0", "r5b", "r5"]),
    ],
)
def test_victims_come_last_first_down_to_the_one_in_need(snapshot, policy, beneficiary, expected):
    choose = get_policy(policy).choose_victims
    assert names(choose(snapshot, snapshot.running[beneficiary], 1)) == expected


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(InvalidConfigError, match=r"fcfs or .*priority"):
        get_policy("lifo")
