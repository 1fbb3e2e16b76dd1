"""`octavo simulate` and `octavo bench goodput --simulate`: arguments in, figures out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.server.cli.main import main
from octavo.server.cli.simulation_args import parse_class

DRAWN = ["--rate", "4", "--duration", "10", "--class", "chat:ttft=1,tpot=0.05"]


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["simulate", "--json", *arguments]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_drawn_traffic_is_simulated_to_the_same_figures_each_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = simulate(capsys, *DRAWN, "--policy", "slo")
    assert first == simulate(capsys, *DRAWN, "--policy", "slo")
    assert first["num_requests"] > 20
    assert first["num_served"] == first["num_requests"]


def test_a_recorded_run_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = str(tmp_path / "log.jsonl")
    simulate(capsys, *DRAWN, "--record", log, "--faults", "cancelled_share=0.2")
    assert main(["simulate", "--replay", log]) == 0
    assert "same decisions" in capsys.readouterr().out
    lines = Path(log).read_text().splitlines()
    Path(log).write_text("\n".join([lines[0], *lines[3:]]))  # the first request never arrives
    assert main(["simulate", "--replay", log]) == 1
    assert "another decision" in capsys.readouterr().out


def test_requests_are_written_one_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    report = simulate(capsys, *DRAWN, "--requests", str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == report["num_requests"]
    assert {line["traffic_class"] for line in lines} == {"chat"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trace", "TRACE"],
        ["--trace", "TRACE", "--rate", "2", "--window", "5:40"],
        ["--users", "4", "--num-requests", "12"],
        ["--step-time", "constant:0.02", "--rate", "2", "--duration", "5", "--num-rows", "4"],
        ["--step-time", "h200", "--rate", "5", "--duration", "5", "--host-us", "300"],
        ["--kv-tokens", "2000", "--host-kv-tokens", "4000", "--page-size", "32", "--duration", "5"],
    ],
)
def test_workloads_and_replicas_of_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    trace = tmp_path / "trace.csv"
    rows = "\n".join(f"{0.5 * n},{50 + n},{5 + n % 7}" for n in range(100))
    trace.write_text(f"arrival_s,input_tokens,output_tokens\n{rows}\n")
    arguments = [str(trace) if part == "TRACE" else part for part in arguments]
    report = simulate(capsys, *arguments)
    assert report["num_requests"] >= 5
    assert report["num_served"] == report["num_requests"]


def test_classes_get_their_shares(capsys: pytest.CaptureFixture[str]) -> None:
    report = simulate(
        capsys, "--rate", "10", "--duration", "60", "--class", "chat:ttft=1,tpot=0.05",
        "--class", "code:share=0.3,ttft=2", "--class", "batch:share=0.2,e2e=60,priority=low",
    )  # fmt: skip
    classes = report["classes"]
    total = report["num_requests"]
    assert classes["code"]["num_requests"] / total == pytest.approx(0.3, abs=0.08)  # type: ignore[index]
    assert classes["batch"]["num_requests"] / total == pytest.approx(0.2, abs=0.08)  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step-time", "constant:x"], "step_time"),
        (["--step-time", "/nowhere"], "profile"),
        (["--trace", "/nowhere"], "trace"),
        (["--setting", "azure"], "trace_dir"),
        (["--faults", "bad=1"], "faults"),
        (["--class", "a:ttft=soon"], "class"),
        (["--policy", "nobody"], "scheduling_policy"),
        (["--replay", "/nowhere"], "log"),
        (["--rate", "0"], "rate"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_class_is_read_from_its_spec() -> None:
    traffic_class, share = parse_class("a:share=0.25,ttft=1,tpot=0.1,priority=high,tenant=t")
    assert share == 0.25
    assert traffic_class.ttft_target_s == 1.0
    assert traffic_class.priority.name == "HIGH"
    assert traffic_class.tenant == "t"


def test_goodput_of_policies_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    status = main(
        ["bench", "goodput", "--simulate", "--policies", "fcfs slo", "--no-oracle", "--rates",
         "2,8", "--seeds", "2", "--jobs", "1", "--duration", "10", "--class",
         "chat:ttft=1,tpot=0.05", "--token-budget", "512", "--tolerance", "0.3",
         "--output", str(out), "--no-plots"]
    )  # fmt: skip
    assert status == 0
    printed = capsys.readouterr().out
    assert "| fcfs (512 tokens) |" in printed
    report = json.loads((out / "goodput.json").read_text())
    assert [result["policy"] for result in report["results"]] == ["fcfs", "slo"]
    assert printed.strip() in (out / "goodput.md").read_text()
