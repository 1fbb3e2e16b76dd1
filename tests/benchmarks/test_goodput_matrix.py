"""The matrix of policies, workloads and loads: what it compares, keeps and refuses."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.request_record import RequestRecord
from octavo.engine.simulation.workloads.traffic import PLAIN, TrafficClass

ROOT = Path(__file__).resolve().parents[2]
OWN = "engine/scheduler/policies/slo/admission.py"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.goodput_matrix.{name}")


def figures(attainment: float, **groups: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "num_requests": 1000, "attainment": attainment, "quartiles": groups.get("quartiles", {}),
        "tenants": groups.get("tenants", {"": [1000, attainment]}),
    }  # fmt: skip


# What a cell says.


def test_a_cell_compares_seed_by_seed(load) -> None:
    """Of 0.02, 0.03 and 0.04 the deviation is 0.01: the interval is 0.03 ± 4.303 · 0.01 / √3."""
    cell = load("verdict").judge_cell(
        "w", 1.0,
        {
            "slo": [figures(a) for a in (0.52, 0.73, 0.94)],
            "edf": [figures(a) for a in (0.50, 0.70, 0.90)],
            "fcfs": [figures(a) for a in (0.10, 0.20, 0.30)],
        },
    )  # fmt: skip
    assert cell["best_rival"] == "edf"
    assert cell["ahead"]["mean"] == pytest.approx(0.03)
    assert cell["ahead"]["ci95"] == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert cell["attainment"]["fcfs"] == pytest.approx(0.2)
    assert cell["shortfalls"] == []


@pytest.mark.parametrize(
    ("ours", "theirs", "falls_short"),
    [
        ((0.80, 0.80, 0.80), (0.804, 0.804, 0.804), False),  # within the margin
        ((0.80, 0.80, 0.80), (0.81, 0.811, 0.812), True),
        ((0.80, 0.80, 0.80), (0.84, 0.76, 0.83), False),  # zero is within the interval
        ((0.80,), (0.81,), True),  # one seed has no interval to hide in
    ],
)
def test_a_cell_falls_short_beyond_margin_and_interval(load, ours, theirs, falls_short) -> None:
    found = {"slo": [figures(a) for a in ours], "sjf": [figures(a) for a in theirs]}
    cell = load("verdict").judge_cell("w", 1.0, found)
    assert bool(cell["shortfalls"]) == falls_short


def test_every_rival_is_compared_not_the_best_alone(load) -> None:
    """The best rival varies, so zero is in its interval; a lesser one is always a little ahead."""
    found = {
        "slo": [figures(a) for a in (0.80, 0.80, 0.80)],
        "edf": [figures(a) for a in (0.90, 0.70, 0.90)],
        "sjf": [figures(a) for a in (0.81, 0.81, 0.81)],
    }
    cell = load("verdict").judge_cell("w", 1.0, found)
    assert cell["best_rival"] == "edf"
    assert cell["shortfalls"] == ["0.010 behind sjf"]


@pytest.mark.parametrize("kind", ["quartiles", "tenants"])
def test_nothing_is_won_by_shedding_the_hard_ones(load, kind) -> None:
    name = "longest" if kind == "quartiles" else "calm"

    def seeds(attainment: float, share: float, count: int) -> list[dict[str, Any]]:
        return [figures(attainment, **{kind: {name: [count, share]}}) for _ in range(3)]

    judge = load("verdict").judge_cell
    found = {"slo": seeds(0.9, 0.40, 100), "edf": seeds(0.8, 0.46, 100)}
    assert len(judge("w", 1.0, found)["shortfalls"]) == 1
    assert name in judge("w", 1.0, found)["shortfalls"][0]
    found["edf"] = seeds(0.8, 0.44, 100)
    assert judge("w", 1.0, found)["shortfalls"] == []
    few = {"slo": seeds(0.9, 0.0, 5), "edf": seeds(0.8, 1.0, 5)}
    assert judge("w", 1.0, few)["shortfalls"] == []


def test_it_must_be_ahead_on_average_where_load_is_high(load) -> None:
    verdict = load("verdict")

    def cell(at: float, ahead: float) -> dict[str, Any]:
        found = {"slo": [figures(0.5 + ahead)], "edf": [figures(0.5)]}
        return verdict.judge_cell("w", at, found)

    assert verdict.judge_all([cell(0.6, 0.0), cell(1.0, 0.03), cell(2.5, 0.06)]) == []
    (text,) = verdict.judge_all([cell(0.6, 0.3), cell(1.0, 0.03), cell(2.5, 0.03)])
    assert text.startswith("0.030 ahead")


def test_means_by_load_are_over_policies_that_every_workload_ran(load) -> None:
    cells = [
        {"load": 1.0, "attainment": {"slo": 0.9, "fcfs": 0.5}, "bound": 1.0},
        {"load": 1.0, "attainment": {"slo": 0.7, "fcfs": 0.1, "edf": 0.9}, "bound": 0.8},
        {"load": 0.6, "attainment": {"slo": 1.0, "fcfs": 0.8}, "bound": 1.0},
    ]
    assert load("verdict").mean_by_load(cells) == [
        {"load": 0.6, "attainment": {"slo": 1.0, "fcfs": 0.8}, "bound": 1.0},
        {
            "load": 1.0,
            "attainment": {"slo": pytest.approx(0.8), "fcfs": pytest.approx(0.3)},
            "bound": pytest.approx(0.9),
        },
    ]


def test_figures_are_by_quartile_of_prompt_length_and_by_tenant(load) -> None:
    def record(n: int, num_input: int, tenant: str, status: str = "stop") -> RequestRecord:
        goals = TrafficClass(name="c", ttft_target_s=1.0, tpot_target_s=1.0, tenant=tenant)
        return RequestRecord(
            request_id=str(n), arrival_s=0.0, num_input=num_input, traffic_class=goals,
            status=status, num_output=1, first_token_s=0.5, last_token_s=0.5,
        )  # fmt: skip

    records = [record(n, n + 1, "a" if n % 2 else "b", "rejected" if n > 5 else "stop")
               for n in range(8)]  # fmt: skip
    plain = replace(records[0], request_id="plain", traffic_class=PLAIN)

    class Report:
        duration_s = 1.0

        def __init__(self, records: list[RequestRecord]) -> None:
            self.records = records

    found = load("runs").report_figures(Report([*records, plain]))
    assert found["num_requests"] == 8
    assert found["attainment"] == 0.75
    assert found["quartiles"] == {
        "long": [2, 1.0], "longest": [2, 0.0], "short": [2, 1.0], "shortest": [2, 1.0],
    }  # fmt: skip
    assert found["tenants"] == {"a": [4, 0.75], "b": [4, 0.75]}
    equal = load("runs").report_figures(Report([record(n, 8448, "") for n in range(8)]))
    assert equal["quartiles"] == {"shortest": [8, 1.0]}


# What is run, and what is kept.


def a_run(load, **changes: Any) -> Any:
    case = replace(load("workloads").get_case("agents"), num_requests=20)
    return load("runs").Run(**{"case": case, "policy": "fcfs", "rate": 1.0, "seed": 1, **changes})


def test_runs_are_kept_by_all_that_they_depend_on(load, tmp_path) -> None:
    made: list[Any] = []

    def make(run: Any, trace_dir: str | None) -> dict[str, Any]:
        made.append(run)
        return {"attainment": 0.5, "run_s": 2.0}

    path = tmp_path / "runs.jsonl"

    def store(sources: str) -> Any:
        return load("runs").RunStore(path, make=make, sources=lambda policy: sources)

    run = a_run(load)
    others = [
        a_run(load, policy="edf"), a_run(load, token_budget=512), a_run(load, rate=2.0),
        a_run(load, seed=2), a_run(load, case=replace(run.case, kv_tokens=32_000)),
        a_run(load, case=replace(run.case, num_requests=21)),
    ]  # fmt: skip
    first = store("one")
    assert len(first.get([run, *others, run])) == 8
    assert len(made) == first.num_made == 7
    again = store("one")
    assert again.get([run])[0]["attainment"] == 0.5
    assert (again.num_made, again.num_kept, len(made)) == (0, 1, 7)
    # A guess of the capacity changes no run; the sources do.
    assert again.get([replace(run, case=replace(run.case, guess=99.0))])
    assert len(made) == 7
    store("two").get([run])
    assert len(made) == 8


def test_other_sources_have_another_hash(load, tmp_path) -> None:
    source_hash = load("runs").source_hash
    for path in ("engine/core.py", "engine/scheduler/policy.py", "engine/simulation/a.py",
                 "engine/execution/step.py", "docs/a.md"):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("1")
    seen = {source_hash("slo", tmp_path)}
    for path in ("engine/execution/step.py", "docs/a.md"):
        (tmp_path / path).write_text("2")
    assert {source_hash("slo", tmp_path)} == seen
    for number, path in enumerate(("engine/core.py", "engine/scheduler/policy.py",
                                   "engine/simulation/a.py"), 2):  # fmt: skip
        (tmp_path / path).write_text("2")
        seen.add(source_hash("slo", tmp_path))
        assert len(seen) == number
    (tmp_path / "engine/simulation/a.py").rename(tmp_path / "engine/simulation/b.py")
    assert source_hash("slo", tmp_path) not in seen
    assert source_hash("slo") == source_hash("slo", ROOT)
    # What `slo` alone decides by changes no rival's figures.
    rival = source_hash("edf:x=1", tmp_path)
    (tmp_path / OWN).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / OWN).write_text("1")
    assert source_hash("edf:x=1", tmp_path) == rival
    assert source_hash("slo:floor=8", tmp_path) not in seen


def test_no_run_is_begun_when_time_is_over(load) -> None:
    runs = load("runs")
    store = runs.RunStore(deadline_s=time.monotonic() - 1, make=lambda run, _: {"attainment": 1.0})
    with pytest.raises(runs.OutOfTimeError):
        store.get([a_run(load)])
    assert store.num_made == 0


def test_processes_make_the_same_runs(load) -> None:
    runs = [a_run(load, policy=policy) for policy in ("fcfs", "slo", "bound")]
    store = load("runs").RunStore(workers=2)
    try:
        found = store.get(runs)
    finally:
        store.close()
    here = load("runs").RunStore().get(runs)
    assert [{**figures, "run_s": 0} for figures in found] == [
        {**figures, "run_s": 0} for figures in here
    ]


# Rivals at their best.


@pytest.mark.parametrize("guess", [0.7, 3.0, 20.0])
def test_the_capacity_is_where_the_best_rival_falls_below_the_threshold(load, guess) -> None:
    tried: list[float] = []

    def attain(rate: float) -> float:
        tried.append(rate)
        return max(0.0, 1 - 0.1 * (rate / 3) ** 3)

    assert load("tuning").find_capacity(attain, guess) == pytest.approx(3.0, rel=0.05)
    assert len(tried) == len(set(tried)) <= 10


def test_halving_spends_on_the_better_ones_and_ends_with_the_best(load) -> None:
    tuning = load("tuning")
    variants = [tuning.Variant("fcfs", budget) for budget in range(1, 13)]
    seen: list[list[int]] = []

    def attain(left: Any, rung: int) -> list[float]:
        budgets = [variant.token_budget for variant in left]
        seen.append(budgets)
        return [1 - abs(budget - 7) / 12 for budget in budgets]

    assert tuning.halve(variants, attain, num_rungs=2) == [variants[6]]
    assert [len(budgets) for budgets in seen] == [12, 3]
    assert set(seen[1]) == {6, 7, 8}


def test_each_load_has_the_variant_that_serves_most_there(load) -> None:
    """At high rates a large budget is best; tuned with other seeds than are measured."""
    tuning, runs = load("tuning"), load("runs")
    seeds = set()

    def make(run: Any, trace_dir: str | None) -> dict[str, Any]:
        seeds.add(run.seed)
        budget = run.token_budget or 0
        suits = budget == (512 if run.rate < 3.5 else 4096)
        return {"attainment": max(0.0, 1 - 0.1 * (run.rate / 3) ** 3 - 0.01 * (not suits))}

    case = load("workloads").get_case("agents")
    store = runs.RunStore(make=make, sources=lambda policy: "")
    tuned = tuning.tune_case(case, store, loads=(0.6, 1.3), policies=("fcfs", "edf-shed"))
    assert tuned["capacity"] == pytest.approx(3.0, rel=0.05)
    assert tuned["loads"]["0.6"]["fcfs"]["token_budget"] == 512
    assert tuned["loads"]["1.3"]["edf-shed"]["token_budget"] == 4096
    assert seeds.isdisjoint({1, 2, 3})


def test_the_committed_tunings_are_of_known_workloads_loads_and_variants(load) -> None:
    tuning, workloads = load("tuning"), load("workloads")
    committed = json.loads(load("__main__").TUNINGS.read_text())["workloads"]
    assert committed
    for name, tuned in committed.items():
        workloads.get_case(name)
        assert tuned["capacity"] > 0
        assert set(tuned["loads"]) == {f"{at:g}" for at in tuning.LOADS}
        assert set(tuned["seeds"]) == set(tuning.TUNING_SEEDS)
        for variants in tuned["loads"].values():
            assert set(variants) == set(tuning.RIVALS)
            for rival, variant in variants.items():
                assert tuning.Variant(**variant) in tuning.RIVALS[rival]


# The whole, on a corner of it.


def write_tunings(path: Path, **loads: Any) -> None:
    rivals = {
        "fcfs": {"policy": "fcfs", "token_budget": 4096},
        "edf-shed": {"policy": "edf-shed:begun=drop", "token_budget": 512},
    }
    tuned = {"capacity": 4.0, "loads": {"1": {**rivals, **loads}}}
    path.write_text(json.dumps({"workloads": {"agents": tuned, "flood": tuned}}))


def test_a_corner_of_the_matrix_runs_and_is_kept(load, tmp_path, capsys) -> None:
    main = load("__main__").main
    write_tunings(tmp_path / "tunings.json")
    command = [
        "evaluate", "--only", "agents", "--only", "flood", "--loads", "1", "--seeds", "1",
        "--num-requests", "40", "--policies", "fcfs,edf-shed", "--workers", "0",
        "--output", str(tmp_path), "--tunings", str(tmp_path / "tunings.json"), "--no-plots",
    ]  # fmt: skip
    status = main(command)
    shown = capsys.readouterr()
    report = json.loads((tmp_path / "matrix.json").read_text())
    assert status == (1 if report["shortfalls"] else 0)
    assert "8 runs" in shown.err
    assert [cell["workload"] for cell in report["cells"]] == ["agents", "flood"]
    assert report["cells"][0]["num_requests"] == [40]
    assert set(report["cells"][1]["groups"]["tenants"]) <= {"flood", "calm"}
    assert shown.out.strip() in (tmp_path / "matrix.md").read_text()
    assert report["command"] == (
        "python -m benchmarks.goodput_matrix evaluate --only agents --only flood --loads 1 "
        "--policies fcfs,edf-shed --num-requests 40 --workers 0 --seeds 1"
    )
    assert main(command) == status
    assert "0 runs" in capsys.readouterr().err


def test_a_cell_that_falls_short_ends_with_status_1(load, tmp_path, capsys, monkeypatch) -> None:
    module = load("__main__")
    write_tunings(tmp_path / "tunings.json")
    ahead = 0.2

    def make(run: Any, trace_dir: str | None) -> dict[str, Any]:
        return {**figures(0.5 + ahead * (run.policy == "slo")), "run_s": 0.0}

    store = load("runs").RunStore
    monkeypatch.setattr(
        module,
        "_store",
        lambda args: store(make=make, deadline_s=deadline_s, sources=lambda policy: ""),
    )
    command = [
        "evaluate", "--only", "agents", "--loads", "1", "--policies", "fcfs", "--no-plots",
        "--output", str(tmp_path), "--tunings", str(tmp_path / "tunings.json"),
    ]  # fmt: skip
    deadline_s = None
    assert module.main(command) == 0
    ahead = -0.2
    assert module.main(command) == 1
    assert "agents at 1: 0.200 behind fcfs" in capsys.readouterr().out
    # What could not be run in time falls short, too.
    ahead, deadline_s = 0.2, 0.0
    assert module.main(command) == 1
    assert "the time was over" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["--only", "nothing"], "workload"),
        (["--only", "agents", "--loads", "7"], "loads"),
        (["--only", "agents", "--policies", "lifo"], "policies"),
        (["--only", "azure-conv", "--loads", "1"], "loads"),
        (["--tunings", "nowhere.json"], "tunings"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(load, tmp_path, capsys, changes, says) -> None:
    write_tunings(tmp_path / "tunings.json")
    command = ["evaluate", "--loads", "1", "--workers", "0", "--output", str(tmp_path),
               "--tunings", str(tmp_path / "tunings.json"), *changes]  # fmt: skip
    assert load("__main__").main(command) == 2
    assert says in capsys.readouterr().err


def test_each_case_fits_its_replica(load) -> None:
    workloads = load("workloads")
    for case in workloads.CASES:
        if case.is_trace:
            continue
        setting = workloads.setting_of(case, None)
        assert setting.max_request_len <= setting.limits.max_model_len
        assert len(setting.traffic(case.guess, 1)) == case.num_requests


@pytest.mark.parametrize(("name", "classes"), [("code", {"code"}), ("conv", {"chat", "batch"})])
def test_a_window_of_a_trace_has_the_rate_that_is_asked_for(load, tmp_path, name, classes) -> None:
    """The trace has 6 requests a second in its first half and 2 in the other."""
    workloads = load("workloads")
    times = [n / 6 for n in range(3000)] + [500 + n / 2 for n in range(1000)]
    rows = [f"{time_s},{100 + n},10" for n, time_s in enumerate(times)]
    text = "\n".join(["arrival_s,input_tokens,output_tokens", *rows])
    path = tmp_path / f"azure_2023_{name}.csv"
    path.write_text(text)
    case = replace(workloads.get_case(f"azure-{name}"), num_requests=400)
    traffic = workloads.setting_of(case, tmp_path).traffic
    for rate in (1.5, 3.0, 9.0):
        for seed in (1, 2, 3):
            arrivals = traffic(rate, seed)
            assert len(arrivals) == 400
            assert 400 / arrivals[-1].arrival_s == pytest.approx(rate, rel=0.12)
            assert len({arrival.request_id for arrival in arrivals}) == 400
            assert {arrival.traffic_class.name for arrival in arrivals} == classes
    places = {tuple(a.num_input for a in traffic(3.0, seed)[:5]) for seed in (1, 2, 3)}
    assert len(places) == 3
    # The trace is too short for 400 requests at a tenth a second.
    assert 50 <= len(traffic(0.1, 1)) <= 150


def test_a_trace_is_known_by_its_content_and_must_be_there(load, tmp_path) -> None:
    workloads = load("workloads")
    case = workloads.get_case("azure-code")
    (tmp_path / case.source).write_text("arrival_s,input_tokens,output_tokens\n0,5,5\n")
    key = workloads.identity(case, tmp_path)
    (tmp_path / case.source).write_text("arrival_s,input_tokens,output_tokens\n0,5,6\n")
    assert workloads.identity(case, tmp_path) != key
    for folder in (None, tmp_path / "elsewhere"):
        with pytest.raises(InvalidConfigError, match="azure_2023_code"):
            workloads.setting_of(case, folder)
