"""The scheduler decides what was recorded: a change of decisions is a commit that says why."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.engine.scheduler import policies
from octavo.engine.scheduler import policy as policy_module
from tests.oracle import digests, record
from tests.oracle.digests import PLANS_PER_MARK, first_difference, marks, play
from tests.oracle.record import PATH, differences, read
from tests.oracle.runs import FAULTS, POLICIES, VARIANTS, Run, all_runs
from tests.oracle.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parents[2]
RUNS = {run.name: run for run in all_runs()}


@pytest.mark.parametrize("policy", [*POLICIES, *VARIANTS])
def test_a_policy_decides_what_was_recorded(policy: str) -> None:
    runs = [run for run in RUNS.values() if run.policy == policy and run.is_quick]
    assert not differences(runs, read())


def test_every_policy_has_runs() -> None:
    assert set(POLICIES) == set(policies.POLICIES)


def test_every_run_is_recorded_and_few_are_left_out() -> None:
    recorded = read()
    assert set(recorded) == set(RUNS)
    left_out = [name for name, values in recorded.items() if not values]
    assert len(left_out) < len(recorded) / 20, left_out
    assert PATH.stat().st_size < 200_000


def test_quick_runs_have_every_pair() -> None:
    quick = [run for run in RUNS.values() if run.is_quick and run.policy in POLICIES]
    assert len({(run.policy, run.workload) for run in quick}) == len(POLICIES) * len(WORKLOADS)
    assert len({(run.policy, run.faults) for run in quick}) == len(POLICIES) * len(FAULTS)
    assert len({(run.workload, run.faults) for run in quick}) == len(WORKLOADS) * len(FAULTS)


def test_each_workload_is_small() -> None:
    for workload in WORKLOADS:
        run = Run(policy="fcfs", workload=workload, faults="none", is_quick=True)
        assert 100 <= len(run.arrivals()) <= 300


def test_runs_contain_every_kind_of_decision() -> None:
    text = "\n".join(
        line
        for run in ("slo / priorities / recovery", "auto / long-prompts / transfers")
        for line in play(RUNS[run])
    )
    for kind in ("preempted", "copy_outs", "copy_ins", "rejected", "demoted", "OverloadedError"):
        assert f'"{kind}"' in text, kind


def test_another_decision_is_found_and_its_place_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RUNS["fcfs / chat / none"]
    original = policy_module.whole_chunk

    def greedy_until_2s(snapshot, request, num_missing, budget):  # type: ignore[no-untyped-def]
        num_tokens = original(snapshot, request, num_missing, budget)
        return num_tokens if snapshot.now_s < 2 else max(1, num_tokens - 1)

    changed = replace(policies.get_policy("fcfs"), chunk=greedy_until_2s)
    before = play(run)
    monkeypatch.setattr(digests, "get_policy", lambda text: changed)
    after = play(run)
    first = next(n for n, (old, new) in enumerate(zip(before, after, strict=False)) if old != new)
    assert first >= PLANS_PER_MARK
    (message,) = differences([run], {run.name: marks(before)})
    assert run.name in message
    low = first // PLANS_PER_MARK * PLANS_PER_MARK
    assert f"{low} to {low + PLANS_PER_MARK - 1}" in message


def test_a_run_that_goes_on_for_longer_differs_after_its_end() -> None:
    lines = [str(number) for number in range(120)]
    assert first_difference(marks(lines), marks(lines)) is None
    assert first_difference(marks(lines[:100]), marks(lines)) == (100, 149)
    assert first_difference(marks(lines[:110]), marks(lines)) == (100, 149)
    assert first_difference(marks(lines), marks(lines[:50])) == (50, 99)


def test_a_run_that_rounding_decides_is_compared_with_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RUNS["slo / chat / none"]

    def played(run: Run, *, stretch: float = 1.0) -> list[str]:
        return ["longer" if stretch > 1 else "as it is"]

    monkeypatch.setattr(digests, "play", played)
    monkeypatch.setattr(record, "play", played)
    assert record.record(run) == []
    assert not differences([run], {run.name: []})
    monkeypatch.setattr(digests, "ROUNDINGS", (1 - 1e-10,))
    assert record.record(run) == marks(["as it is"])


def test_a_run_is_the_same_in_another_process() -> None:
    name = "slo / tenants / recovery"
    code = (
        "from tests.oracle.digests import marks, play\n"
        "from tests.oracle.runs import all_runs\n"
        f"print(*marks(play(next(run for run in all_runs() if run.name == {name!r}))))"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT,
        env=environ,
    )  # fmt: skip
    assert done.stdout.split() == marks(play(RUNS[name]))
