"""The serving benchmark: its arithmetic by hand, and a run against a live server."""

from __future__ import annotations

import collections
import dataclasses
import json
from types import SimpleNamespace

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.bench_requests import bench_requests, random_workload
from octavo.engine.simulation.workloads.spec import Extent, generated_workload
from octavo.engine.simulation.workloads.traffic import TrafficClass
from octavo.server.cli.bench_serve import as_text, with_arrivals
from octavo.server.cli.main import main
from octavo.server.load.arrivals import send_all
from octavo.server.load.figures import Sent, summarize
from octavo.server.load.grpc_load import GrpcTarget
from octavo.server.load.http_load import HttpTarget


def sent(begin_s: float, *token_s: float, num_output: int | None = None) -> Sent:
    return Sent(
        num_prompt=10, num_output=num_output or len(token_s), sent_s=begin_s,
        token_s=list(token_s), ended_s=token_s[-1],
    )  # fmt: skip


def test_figures_are_those_a_person_works_out():
    # The second one's five tokens came in two parts.
    both = [sent(1.0, 1.5, 1.7, 2.1), sent(2.0, 2.25, 3.0, num_output=5)]
    failed = Sent(sent_s=2.5, ended_s=5.0, error="503")
    report = summarize([*both, failed], {"ttft": 300, "e2el": 2000})
    assert (report["completed"], report["failed"]) == (2, 1)
    assert report["duration"] == 4.0
    assert report["total_input_tokens"] == 20
    assert report["total_output_tokens"] == 8
    assert report["output_throughput"] == 2.0
    assert report["request_throughput"] == 0.5
    assert report["request_goodput"] == 0.25
    assert report["mean_ttft_ms"] == pytest.approx(375)
    assert report["mean_tpot_ms"] == pytest.approx((300 + 187.5) / 2)
    assert report["mean_e2el_ms"] == pytest.approx(1050)
    assert report["median_itl_ms"] == pytest.approx(400)


def test_nothing_answered_has_no_times():
    report = summarize([Sent(error="x")])
    assert report["failed"] == 1
    assert not [name for name in report if name.endswith("_ms")]


def test_arrivals_come_at_the_rate_and_the_same_for_a_seed():
    requests = random_workload(2000, (4, 4), (4, 4), 300, 1)
    timed = with_arrivals(requests, 50.0, seed=3)
    assert timed == with_arrivals(requests, 50.0, seed=3)
    assert timed[0].arrival_s == 0.0
    assert 2000 / timed[-1].arrival_s == pytest.approx(50.0, rel=0.1)
    assert with_arrivals(requests, float("inf"), seed=3) == requests
    with pytest.raises(InvalidConfigError, match="request_rate"):
        with_arrivals(requests, 0.0, seed=3)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_live_server_is_measured(live, capsys, protocol):
    where = ("--base-url", live.http) if protocol == "http" else ("--grpc", live.grpc)
    status = main(
        [
            *("bench", "serve", *where, "--num-prompts", "12", "--vocab-size"),
            *("258", "--prompt-len", "4:20", "--output-len", "3:9", "--request-rate", "200"),
            *("--max-concurrency", "4", "--goodput", "e2el:1000000", "--json"),
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (report["completed"], report["failed"]) == (12, 0)
    requests = random_workload(12, (4, 20), (3, 9), 258, 1)
    assert report["total_input_tokens"] == sum(len(r.prompt_token_ids) for r in requests)
    assert report["total_output_tokens"] == sum(r.max_tokens for r in requests)
    assert report["request_goodput"] == report["request_throughput"]
    assert 0 < report["median_ttft_ms"] <= report["p99_ttft_ms"] <= report["p99_e2el_ms"]


WORKLOAD = ("reasoning:input_len=4:20,median=5,min_output=2", "flood:input_len=4:20,output_len=2:9")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_workload_is_sent_to_a_live_server(live, capsys, protocol):
    where = ("--base-url", live.http) if protocol == "http" else ("--grpc", live.grpc)
    status = main(
        [
            *("bench", "serve", *where, "--num-requests", "8", "--vocab-size", "258", "--rate"),
            *("100", "--json", "--workload", WORKLOAD[0], "--workload", WORKLOAD[1]),
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (report["completed"], report["failed"]) == (8, 0)
    offered = generated_workload(WORKLOAD, Extent(num_requests=8)).traffic(100.0, 1)
    assert report["total_input_tokens"] == sum(a.num_input for a in offered)
    assert report["total_output_tokens"] == sum(a.num_output for a in offered)
    assert report["request_goodput"] <= report["request_throughput"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_are_sent_with_their_targets_tenants_and_classes(on_stand, protocol):
    offered = generated_workload(WORKLOAD, Extent(num_requests=30)).traffic(300.0, 1)

    async def scenario(stand):
        stand.engine.model_config = SimpleNamespace(
            vocab_size=1000, hidden_size=8, num_layers=1, attentions=tuple, eos_token_ids=(),
        )  # fmt: skip
        target = HttpTarget(stand.http) if protocol == "http" else GrpcTarget(stand.address)
        sent = await send_all(target, bench_requests(offered, 1000))
        assert [item.error for item in sent] == [None] * 30
        assert [item.traffic_class for item in sent] == [a.traffic_class for a in offered]
        seen = collections.Counter(
            (k["tenant"], k["priority"], *dataclasses.astuple(k["targets"]))
            for k in stand.engine.seen
        )
        promised = [a.traffic_class for a in offered]
        assert seen == collections.Counter(
            (c.tenant, c.priority, c.ttft_target_s, c.tpot_target_s, c.e2e_target_s)
            for c in promised
        )
        assert len(seen) == 4  # two tenants, interactive and batch

    on_stand(scenario, http_port=0)


def test_requests_are_held_to_their_own_targets():
    late, none = TrafficClass(name="a", ttft_target_s=0.4), TrafficClass(name="b")
    answers = [sent(1.0, 1.5, 1.7), sent(1.0, 1.5, 1.7), sent(1.0, 1.3, 5.0)]
    for answer, kind in zip(answers, (late, none, late), strict=True):
        answer.traffic_class = kind
    assert summarize(answers)["request_goodput"] == pytest.approx(2 / 4)
    assert summarize(answers, {"ttft": 600})["request_goodput"] == pytest.approx(3 / 4)
    assert "request_goodput" not in summarize([sent(1.0, 1.5)])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_that_the_server_refuses_are_counted_and_reported(live, capsys, protocol):
    where = ("--base-url", live.http) if protocol == "http" else ("--grpc", live.grpc)
    arguments = ["bench", "serve", *where, "--num-prompts", "2"]
    assert main([*arguments, "--vocab-size", "258", "--extra-body", '{"top_p": 5}', "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["failed"] == 2
    assert "top_p" in err


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--base-url", "http://127.0.0.1:1"], "base_url"),
        (["--grpc", "127.0.0.1:1"], "grpc"),
        (["--grpc", "127.0.0.1:1", "--max-concurrency", "0"], "max_concurrency"),
        (["--base-url", "http://127.0.0.1:1", "--goodput", "speed:3"], "goodput"),
        (["--base-url", "http://127.0.0.1:1", "--extra-body", "[]"], "extra_body"),
        (["--base-url", "http://127.0.0.1:1", "--workload", "nobody"], "workload"),
        (["--base-url", "http://127.0.0.1:1", "--workload", "chat", "--rate", "0"], "rate"),
        (["--base-url", "http://127.0.0.1:1", "--workload", "chat", "--vocab-size", "9"], "vocab"),
        (["--base-url", "http://127.0.0.1:1", "--trace", "/nowhere"], "trace"),
        (["--base-url", "http://127.0.0.1:1", "--ttft", "0"], "ttft"),
        (["--base-url", "http://127.0.0.1:1", "--class", "a"], "class"),
        (["--base-url", "http://127.0.0.1:1", "--arrivals", "recorded"], "arrivals"),
        (["--base-url", "http://127.0.0.1:1", "--token-env", "OCTAVO_NO_SUCH"], "token_env"),
    ],
)
def test_bad_arguments_are_named(arguments, field, capsys):
    assert main(["bench", "serve", *arguments]) == 2
    assert field in capsys.readouterr().err


def test_every_figure_is_printed_with_its_unit():
    sent = [Sent(num_prompt=3, num_output=2, sent_s=0.0, token_s=[0.5, 1.0], ended_s=1.0)]
    report = summarize(sent, {"ttft": 1000.0})
    units = {}
    for line in as_text(report).splitlines():
        name, _, unit = line.split()
        units[name] = unit
    assert set(units) == set(report)
    assert units["request_throughput"] == units["request_goodput"] == "requests/s"
    assert units["output_throughput"] == "tokens/s"
    assert units["duration"] == "s"
    assert {units[name] for name in report if name.endswith("_ms")} == {"ms"}
