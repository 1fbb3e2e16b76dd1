"""The measuring that all peers share: what is counted, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


class Counting:
    """Its output is worked out by hand: token k of a request is its prompt's sum + k."""

    def __init__(self, peer, missing: int = 0) -> None:
        self.settings = {"kind": "counting"}
        self._peer, self._missing = peer, missing
        self.calls: list[int] = []

    def generate(self, requests):
        self.calls.append(len(requests))
        return [
            self._peer.Completion(
                [sum(r.prompt_token_ids) + k for k in range(r.max_tokens - self._missing)],
                0.010 * (index + 1),
                0.010 * (index + 1) + 0.005 * (r.max_tokens - 1),
            )
            for index, r in enumerate(requests)
        ]


@pytest.fixture
def peer(peers_module):
    return peers_module("peer")


@pytest.fixture
def workload(peer):
    def requests(count: int, prompt: int, output: int):
        return [peer.PeerRequest([1] * prompt, output) for _ in range(count)]

    return peer.PeerWorkload(
        warmup=requests(1, 2, 2),
        batches={"2": requests(2, 3, 4), "5": requests(5, 6, 7)},
        prefill=requests(2, 8, 1),
        single=requests(3, 2, 9),
    )


def test_every_section_is_served_and_single_streams_are_alone(peer, workload) -> None:
    engine = Counting(peer)
    peer.measure(engine, workload)
    assert engine.calls == [1, 2, 5, 2, 1, 1, 1]


def test_rates_follow_from_the_tokens_counted_and_the_time_taken(peer, workload) -> None:
    result = peer.measure(Counting(peer), workload)
    assert list(result["batches"]) == ["2", "5"]
    for name, num_prompt, num_output in (("2", 6, 8), ("5", 30, 35)):
        batch = result["batches"][name]
        assert (batch["num_prompt_tokens"], batch["num_output_tokens"]) == (num_prompt, num_output)
        assert batch["output_tokens_per_s"] * batch["batch_s"] == pytest.approx(num_output)
        assert batch["total_tokens_per_s"] * batch["batch_s"] == pytest.approx(
            num_prompt + num_output
        )
    assert result["batches"]["2"]["outputs"] == [[3, 4, 5, 6]] * 2
    assert len(result["single_stream_runs"]) == 3
    assert result["single_stream_tokens_per_s"] == sorted(result["single_stream_runs"])[1]


def test_the_largest_batch_gives_the_headline(peer, workload) -> None:
    result = peer.measure(Counting(peer), workload)
    assert result["num_requests"] == 5
    assert result["output_tokens_per_s"] == result["batches"]["5"]["output_tokens_per_s"]
    assert "outputs" not in result


def test_percentiles_are_of_the_requests_own_times(peer, workload) -> None:
    result = peer.measure(Counting(peer), workload)
    assert result["ttft_ms"] == {"p50": 30.0, "p90": 50.0, "p99": 50.0}
    assert result["tpot_ms"] == {"p50": 5.0, "p90": 5.0, "p99": 5.0}


def test_percentiles_of_unknown_times_are_unknown(peer) -> None:
    assert peer.percentiles_ms([]) is None
    assert peer.percentiles_ms([0.1, None]) is None
    assert peer.Completion([1, 2]).tpot_s is None
    assert peer.Completion([1], 0.1, 0.1).tpot_s is None


def test_an_engine_that_stops_early_is_not_given_a_rate(peer, workload) -> None:
    with pytest.raises(RuntimeError, match="request 0: 1 tokens came back, 2 were asked for"):
        peer.measure(Counting(peer, missing=1), workload)


def test_the_command_writes_one_json_object(peer, workload, tmp_path: Path, monkeypatch) -> None:
    def rows(requests):
        return [
            {"prompt_token_ids": r.prompt_token_ids, "max_tokens": r.max_tokens} for r in requests
        ]

    sections = {
        "warmup": rows(workload.warmup),
        "batches": {name: rows(batch) for name, batch in workload.batches.items()},
        "prefill": rows(workload.prefill),
        "single": rows(workload.single),
    }
    (tmp_path / "in.json").write_text(json.dumps(sections))
    argv = ["x", f"--workload={tmp_path / 'in.json'}", f"--out={tmp_path / 'out.json'}"]
    monkeypatch.setattr("sys.argv", [*argv, "--model=m", "--own=7"])
    monkeypatch.setenv(peer.STARTED_AT_VARIABLE, "0")
    seen = []

    def build(args):
        seen.append((args.model, args.dtype, args.own))
        return Counting(peer)

    peer.main("Counting", build, lambda parser: parser.add_argument("--own", type=int))
    result = json.loads((tmp_path / "out.json").read_text())
    assert seen == [("m", "float32", 7)]
    assert result["name"] == "Counting"
    assert result["settings"] == {"kind": "counting"}
    assert result["start_to_first_token_s"] > 0
    assert result["batches"]["5"]["num_requests"] == 5


def test_processor_time_counts_processes_below_this_one(peer):
    spin = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); input()"
    before_s = peer.cpu_s()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", spin], **pipes) as child:
        child.stdout.readline()
        assert 0.4 < peer.cpu_s() - before_s < 5
        child.communicate(b"\n")
