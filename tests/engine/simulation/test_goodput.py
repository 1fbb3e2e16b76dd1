"""Goodput: bisection finds the edge, tables and plots show what was found."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.observability.event_log import EventLines
from octavo.engine.observability.schedule import ScheduleReader
from octavo.engine.simulation.executor import SwapLink
from octavo.engine.simulation.goodput import (
    Candidate,
    Runs,
    measure_goodput,
    run_once,
    tune,
)
from octavo.engine.simulation.goodput_report import (
    bound_line,
    class_table,
    detail_table,
    goodput_table,
    guarantee_table,
    keeps_guarantees,
    ratio_lines,
)
from octavo.engine.simulation.settings import Setting, replica_limits
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME
from octavo.engine.simulation.workloads.arrivals import gamma_arrivals, uniform_lengths
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

CHAT = TrafficClass(name="chat", ttft_target_s=1.0, tpot_target_s=0.05)


@pytest.fixture
def setting() -> Setting:
    def traffic(rate: float, seed: int) -> list[Arrival]:
        lengths = uniform_lengths((50, 1500), (5, 60))
        return gamma_arrivals(rate, 6.0, lengths, seed=seed, traffic_class=CHAT)

    return Setting(
        name="small", limits=replica_limits(kv_tokens=16_000, num_rows=32), link=SwapLink(),
        step_time=NIYAMA_STEP_TIME, traffic=traffic, rates=(2.0, 4.0, 16.0), max_tokens=256,
    )  # fmt: skip


def test_a_run_is_the_same_every_time(setting: Setting) -> None:
    candidate = Candidate(policy="slo")
    first, second = (run_once(setting, candidate, 4.0, 1) for _ in range(2))
    assert [r.to_dict() for r in first.records] == [r.to_dict() for r in second.records]


def test_a_token_budget_takes_the_place_of_the_settings(setting: Setting) -> None:
    run = run_once(setting, Candidate(policy="fcfs", token_budget=64), 4.0, 1, keep_timeline=True)
    assert max(step.plan.num_tokens for step in run.timeline) == 64


def test_tuning_takes_the_budget_that_serves_most(setting: Setting) -> None:
    variants = [Candidate(policy="fcfs", token_budget=budget) for budget in (32, 1024)]
    assert tune(setting, variants, seeds=(9,)).token_budget == 1024


def test_tuning_is_for_the_rates_that_are_compared(setting: Setting) -> None:
    tried: list[float] = []

    def submit(candidate: Candidate, rate: float, seed: int) -> Future[dict[str, Any]]:
        tried.append(rate)
        better = 64 if rate < 5 else 1024
        future: Future[dict[str, Any]] = Future()
        future.set_result({"attainment": 0.5 + 0.1 * (candidate.token_budget == better)})
        return future

    variants = [Candidate(policy="fcfs", token_budget=budget) for budget in (64, 1024)]
    for rates, best in (((3.0,), 64), ((7.0, 9.0), 1024), (None, 64)):
        runs = Runs(setting, submit)
        assert tune(setting, variants, seeds=(9,), rates=rates, runs=runs).token_budget == best
    assert set(tried) == {3.0, 7.0, 2.0}


def test_runs_are_made_once_wherever_they_are_made(setting: Setting) -> None:
    made: list[tuple[str, float, int]] = []

    def submit(candidate: Candidate, rate: float, seed: int) -> Future[dict[str, Any]]:
        made.append((candidate.policy, rate, seed))
        future: Future[dict[str, Any]] = Future()
        future.set_result({"attainment": max(0.0, 1 - 0.1 * (rate / 3) ** 2), "figure": rate})
        return future

    runs = Runs(setting, submit)
    result = measure_goodput(setting, Candidate(policy="fcfs"), seeds=(1, 2, 3), runs=runs)
    assert len(made) == len(set(made)) == len(runs)
    assert result["goodput"]["0.9"]["mean"] == pytest.approx(3.0, rel=0.03)
    assert [row["rate"] for row in result["rates"]] == [2.0, 4.0, 16.0]


@pytest.fixture
def results(setting: Setting) -> list[dict[str, Any]]:
    return [
        measure_goodput(setting, Candidate(policy=name), seeds=(1, 2), tolerance=0.5)
        for name in ("fcfs", "slo")
    ]


def test_results_are_shown_as_tables_and_plots(
    results: list[dict[str, Any]], setting: Setting, tmp_path: Path
) -> None:
    attained = [row["attainment"]["mean"] for row in results[0]["rates"]]
    assert attained[0] > attained[-1]
    assert 0.25 <= results[0]["goodput"]["0.9"]["mean"] <= 16.0
    table = goodput_table(results)
    assert [line.split("|")[1].strip() for line in table.splitlines()] == [
        "policy", "---", "fcfs", "slo",
    ]  # fmt: skip
    assert "TTFT" in detail_table(results, 4.0)
    assert "chat" in class_table(results, 4.0)
    kept = guarantee_table(results)
    assert "slo" in kept
    assert "fcfs" not in kept
    assert all(keeps_guarantees(row) for result in results for row in result["rates"])
    assert "x fcfs" in ratio_lines(results)
    bounds = dict.fromkeys((2.0, 4.0, 16.0), 1.0)
    assert "slo attains" in bound_line(results, bounds)
    assert bound_line(results[:1], bounds) == ""

    pytest.importorskip("matplotlib")
    from octavo.engine.simulation import plots

    plots.plot_goodput(results, tmp_path / "goodput.svg")
    plots.plot_attainment(results, tmp_path / "classes.svg", rate=4.0)
    reader = ScheduleReader()
    run_once(setting, Candidate(policy="slo"), 4.0, 1, observer=EventLines(reader.read))
    plots.plot_schedule(reader.schedule.since(1.0), tmp_path / "timeline.svg")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["classes.svg", "goodput.svg", "timeline.svg"]
    again = tmp_path / "again.svg"
    plots.plot_goodput(results, again)
    assert again.read_bytes() == (tmp_path / "goodput.svg").read_bytes()
