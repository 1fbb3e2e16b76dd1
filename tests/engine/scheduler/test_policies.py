"""Policies are pure: a snapshot in, a decision out."""

from __future__ import annotations

import math

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.request import Priority
from octavo.engine.scheduler.forecast import Forecast
from octavo.engine.scheduler.length_estimator import LengthEstimator
from octavo.engine.scheduler.policies import get_policy, policy_names
from octavo.engine.scheduler.policy import Snapshot
from octavo.engine.scheduler.row_table import RowTable
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
        rows=RowTable(limits.max_num_seqs, limits.page_size),
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


def test_a_bad_parameter_is_refused_by_name_value_and_what_is_allowed():
    with pytest.raises(InvalidConfigError) as caught:
        get_policy("fcfs:token_budget=-3")
    text = str(caught.value)
    assert "fcfs: token_budget" in text
    assert "'-3'" in text
    assert "an integer of at least 1" in text


MY_POLICY = """
from octavo.engine.scheduler.policy import Policy


def place(request, forecast):
    return (-request.arrival_s,)


def make(parameters):
    return Policy(name="newest-first", place=place, budget=parameters.static_budget())
"""


@pytest.fixture
def installed_policy(tmp_path, monkeypatch):
    """A distribution as an installer leaves it: a module, and metadata that names it."""
    (tmp_path / "newest_first.py").write_text(MY_POLICY)
    info = tmp_path / "newest_first-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newest-first\nVersion: 1.0\n")
    entry_point = "[octavo.scheduling_policies]\nnewest-first = newest_first:make\n"
    (info / "entry_points.txt").write_text(entry_point)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("installed_policy")
def test_an_installed_distributions_policy_runs_by_its_name(drive, request_of):
    assert "newest-first" in policy_names()
    driver = drive(
        {"max_num_seqs": 1, "max_num_batched_tokens": 16}, policy="newest-first:token_budget=8"
    )
    for arrival_s in range(3):
        driver.add(request_of(f"r{arrival_s}", 8, 2, arrival_s=float(arrival_s)))
    driver.drain()
    order = [row.request.request_id for p in driver.plans for row in p.prefill_rows if row.is_new]
    assert order == ["r2", "r1", "r0"]


def test_a_late_request_or_one_that_gave_way_preempts_nobody(snapshot, fakes):
    """Else two whose urgency changes as they run take each other's pages for ever."""
    choose = get_policy("edf").choose_victims
    urgent = fakes.request("urgent", arrival_s=9.0, priority=Priority.NORMAL)
    urgent.ttft_target_s = 1.0
    assert names(choose(snapshot, urgent, 0)) == ["r5b"]
    urgent.metrics.num_preemptions = 1
    assert choose(snapshot, urgent, 0) == []
    urgent.metrics.num_preemptions = 0
    urgent.ttft_target_s = 1e-9
    snapshot.forecast.step_time.num_observed = 100
    assert choose(snapshot, urgent, 0) == []


def test_what_a_request_decodes_moves_niyamas_place_where_it_is_due_at_its_end(snapshot, fakes):
    forecast = snapshot.forecast
    token_s, step_s = forecast.prefill_token_s, forecast.step_s
    assert 0 < token_s < step_s

    def place(decode, **targets):
        request = fakes.request("r", arrival_s=9.0, priority=Priority.NORMAL)
        for name, value in targets.items():
            setattr(request, name, value)
        request.known_output_len = 40
        policy = get_policy(f"niyama:alpha=2,decode={decode},lengths=declared")
        forecast.uses_declared_lengths = policy.uses_declared_lengths
        return policy.place(request, forecast)[0], request.num_tokens

    batch = {"e2e_target_s": 60.0}
    alone, num_tokens = place("none", **batch)
    assert alone == pytest.approx(69.0 + 2 * num_tokens * token_s, abs=1e-9)
    assert place("work", **batch)[0] == pytest.approx(alone + 2 * 40 * token_s, abs=1e-9)
    assert place("due", **batch)[0] == pytest.approx(alone - 40 * step_s, abs=1e-9)
    chat = {"ttft_target_s": 1.0, "tpot_target_s": 0.05}
    assert place("work", **chat) == place("due", **chat) == place("none", **chat)
    assert place("work")[0] == math.inf
