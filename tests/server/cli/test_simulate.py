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


def test_a_stretch_is_drawn_alike_from_a_run_and_from_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    log, names = str(tmp_path / "log.jsonl"), ("run", "replay")
    pictures = [
        ["--show", "2:5", "--plot", str(tmp_path / f"{name}.svg"),
         "--perfetto", str(tmp_path / f"{name}.json")]
        for name in names
    ]  # fmt: skip
    simulate(capsys, *DRAWN, "--policy", "slo", "--record", log, *pictures[0])
    simulate(capsys, "--replay", log, *pictures[1])
    for kind in ("svg", "json"):
        first, second = ((tmp_path / f"{name}.{kind}").read_text() for name in names)
        assert first == second
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert len(steps) > 20
    # A step counts where it ends; what began before is whole.
    assert max(event["ts"] + event["dur"] for event in steps) <= 4e6


@pytest.mark.parametrize("stretch", ["5", "5:", "5:5", "6:5", "-1:5", "a:b", "nan:5", "0:nan"])
def test_a_stretch_that_is_none_is_refused(
    stretch: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["simulate", *DRAWN, f"--show={stretch}", "--perfetto", str(tmp_path / "trace")]
    assert main(words) == 2
    assert "show" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--workload", "sessions:first_len=200:400,max_context=900,new_len=20:90"],
        ["--workload", "chat", "--workload", "tight-chat:share=2", "--rate", "3"],
        ["--workload", "mix:flood=1,bursts=1", "--ttft", "2", "--arrivals", "poisson"],
        ["--trace", "TABLE", "--arrivals", "gamma:cv=2", "--rate", "4"],
        ["--trace", "TABLE", "--trace-format", "lengths", "--tpot", "0.2"],
        ["--arrivals", "gamma:cv=2"],
    ],
)
def test_a_workload_is_played_by_name_and_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    table = tmp_path / "lengths.csv"
    table.write_text("input_tokens,output_tokens\n50,5\n70,9\n")
    arguments = [str(table) if part == "TABLE" else part for part in arguments]
    report = simulate(capsys, *arguments, "--num-requests", "30")
    assert report["num_requests"] == report["num_served"] == 30
    assert report == simulate(capsys, *arguments, "--num-requests", "30")


def test_targets_are_those_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    steps = ["--workload", "chat", "--num-requests", "20", "--step-time", "constant:0.1"]
    assert simulate(capsys, *steps)["attainment"] == 0.0  # 100 ms a token, 50 wanted
    assert simulate(capsys, *steps, "--tpot", "0.2")["attainment"] == 1.0
    assert simulate(capsys, *steps, "--tpot", "0.2", "--ttft", "0.05")["attainment"] == 0.0


def test_prefixes_are_shared_if_the_cache_is_on(capsys: pytest.CaptureFixture[str]) -> None:
    agents = ["--workload", "agents", "--num-requests", "20"]
    off, on = simulate(capsys, *agents), simulate(capsys, *agents, "--enable-prefix-caching")
    assert off["prefill_tokens"] == 20 * (8192 + 256)
    assert on["prefill_tokens"] == 8192 + 20 * 256
    assert simulate(capsys, *agents, "--prefix-caching") == on


def test_a_replica_is_as_large_as_the_workloads_longest_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,100,5\n1,20000,3000\n")
    arguments = ["--trace", str(trace), "--step-time", "constant:0.01"]
    report = simulate(capsys, *arguments)
    assert report["num_served"] == 2
    assert report["output_tokens_per_s"] * report["duration_s"] == pytest.approx(3005)
    assert main(["simulate", "--json", *arguments, "--max-model-len", "16384"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["num_failed"] == 1
    assert "the longest request has 23000 tokens and the replica takes 16384" in err


def test_classes_keep_the_tenants_of_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "log.jsonl"
    trace.write_text("client_id,timestamp,input_tokens,output_tokens\na,0,9,5\nb,1,9,5\n")
    simulate(capsys, "--trace", str(trace), "--class", "chat:ttft=1", "--record", str(out))
    added = [json.loads(line).get("add") for line in out.read_text().splitlines()]
    assert [request["tenant"] for request in added if request] == ["a", "b"]


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
        (["--rate", "nan"], "rate"),
        (["--workload", "nobody"], "workload"),
        (["--workload", "chat:ttft_s=0"], "ttft_s"),
        (["--workload", "chat", "--trace", "t.csv"], "trace"),
        (["--workload", "chat", "--class", "a"], "class"),
        (["--workload", "chat", "--window", "1:2"], "window"),
        (["--workload", "chat", "--arrivals", "recorded"], "arrivals"),
        (["--workload", "chat", "--users", "3"], "workload"),
        (["--workload", "chat", "--setting", "azure"], "workload"),
        (["--arrivals", "recorded"], "arrivals"),
        (["--window", "1:2"], "window"),
        (["--trace-format", "azure"], "trace_format"),
        (["--ttft", "0"], "ttft"),
        (["--tpot", "nan"], "tpot"),
        (["--ttft", "86401"], "ttft"),
        (["--class", "a:e2e=86401"], "e2e"),
        (["--num-requests", "0"], "num_requests"),
        (["--duration", "-1"], "duration"),
        (["--max-model-len", "1"], "max_model_len"),
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


def test_goodput_is_simulated_with_the_prefix_cache_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 3 requests a second of 8,448 tokens: a hopeless load, unless their beginning is computed once.
    arguments = ["bench", "goodput", "--simulate", "--policies", "fcfs", "--token-budget", "512",
                 "--workload", "agents:output_len=4:8", "--num-requests", "60", "--rates", "3",
                 "--seeds", "1", "--jobs", "1", "--json"]  # fmt: skip
    attained, bounds = {}, {}
    for cache in ("--no-enable-prefix-caching", "--enable-prefix-caching"):
        assert main([*arguments, cache]) == 0
        report = json.loads(capsys.readouterr().out)
        attained[cache] = report["results"][0]["rates"][0]["attainment"]["mean"]
        (bounds[cache],) = (bound["attainment"] for bound in report["bounds"])
    assert attained["--no-enable-prefix-caching"] < 0.1
    assert attained["--enable-prefix-caching"] > 0.9
    # What prompts share bounds nothing where it is computed once.
    assert attained["--no-enable-prefix-caching"] <= bounds["--no-enable-prefix-caching"] < 0.7
    assert bounds["--enable-prefix-caching"] == 1.0


def test_goodput_takes_prompts_as_long_as_the_workload_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["bench", "goodput", "--simulate", "--policies", "fcfs", "--token-budget", "512",
                 "--workload", "chat:input_len=20000,output_len=4,ttft_s=60,tpot_s=1",
                 "--num-requests", "5", "--rates", "0.1", "--seeds", "1", "--jobs", "1",
                 "--json"]  # fmt: skip
    for more, attained in ((), 1.0), (("--max-model-len", "16384"), 0.0):
        assert main([*arguments, *more]) == 0
        out, err = capsys.readouterr()
        row = json.loads(out)["results"][0]["rates"][0]
        assert row["attainment"]["mean"] == attained
        assert ("the replica takes 16384" in err) == bool(more)


FLEET = [*DRAWN, "--policy", "slo", "--replicas", "2"]


def test_a_fleet_goes_the_same_way_each_time_and_in_every_process(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    options = ["--fronts", "2", "--report-loss", "0.2", "--disasters", "deaths=600,restart_s=1",
               "--machine", "old:speed=0.5", "--machine", "new:share=2"]  # fmt: skip
    first = simulate(capsys, *FLEET, *options, "--requests", str(path))
    assert first == simulate(capsys, *FLEET, *options, "--processes", "2")
    assert first["digest"] != simulate(capsys, *FLEET, *options, "--seed", "2")["digest"]
    assert first["num_failed"] == first["num_unfinished"] == 0
    assert first["num_continued"] > 0
    places = [json.loads(line)["replicas"] for line in path.read_text().splitlines()]
    assert {0, 1} == {at for found in places for at in found}


@pytest.mark.parametrize(
    "wrong",
    [
        ["--router", "magic"],
        ["--replicas", "0"],
        ["--users", "4"],
        ["--record", "log"],
        ["--report-age", "0"],
        ["--fronts", "0"],
        ["--machine", "old:speed=-1"],
        ["--disasters", "deaths"],
        ["--autoscale", "moods"],
    ],
)
def test_a_fleet_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    assert main(["simulate", *FLEET, *wrong]) == 2
    assert wrong[1].partition(":")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("--router=least_work", "router"),
        ("--fronts=2", "fronts"),
        ("--machine=a:share=1", "machines"),
    ],
)
def test_a_fleets_options_are_not_ignored_without_one(
    option: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--rate", "1", "--duration", "1", option]) != 0
    assert f"{field} = " in capsys.readouterr().err
