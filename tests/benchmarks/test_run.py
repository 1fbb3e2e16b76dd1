"""The runner: real processes of a peer that is small enough to read here."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
sys.path.insert(0, {peers!r})
from peer import Completion, main

class Echo:
    settings = {{
        "threads": os.environ["OMP_NUM_THREADS"],
        "cores": sorted(os.sched_getaffinity(0)),
        "cache": os.environ["XDG_CACHE_HOME"],
    }}
    def generate(self, requests):
        if {broken}:
            raise SystemExit("the engine broke")
        return [Completion([r.prompt_token_ids[0]] * r.max_tokens, 0.1, 0.2) for r in requests]

main("Echo", lambda args: Echo())
"""

pytestmark = pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")


@pytest.fixture
def run(peers_module):
    return peers_module("run")


@pytest.fixture
def stub_peers(run, peers_module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Replaces the catalogue by Octavo and another, both stubs; returns how to break one."""
    catalogue = peers_module("catalogue")

    def install(**broken: bool) -> None:
        peers = {}
        for name in ("octavo", "other"):
            script = tmp_path / f"{name}_peer.py"
            script.write_text(
                SCRIPT.format(peers=str(catalogue.HERE), broken=broken.get(name, False))
            )
            peers[name] = catalogue.Peer(
                name.title(),
                str(script),
                Path(sys.executable),
                "model",
                small_batch_only=name == "other",
            )
        monkeypatch.setattr(run, "catalogue", lambda *_: peers)

    return install


def arguments(tmp_path: Path, *more: str) -> list[str]:
    core = str(min(os.sched_getaffinity(0)))
    return [
        f"--envs={tmp_path}",
        f"--log-dir={tmp_path / 'logs'}",
        f"--cores={core}",
        "--num-prompts=6",
        "--small-num-prompts=2",
        f"--out={tmp_path / 'out' / 'result'}",
        *more,
    ]


def test_peers_run_pinned_on_one_workload_and_a_table_is_written(
    run, stub_peers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_peers()
    assert run.main(arguments(tmp_path, "--repeats=2")) == 0
    summary = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {name: len(results) for name, results in summary["runs"].items()} == {
        "Octavo": 2,
        "Other": 2,
    }
    octavo = summary["runs"]["Octavo"][0]
    assert octavo["settings"]["threads"] == "1"
    assert octavo["settings"]["cores"] == [min(os.sched_getaffinity(0))]
    assert octavo["settings"]["cache"] == str(tmp_path / "cache")
    assert list(octavo["batches"]) == ["2", "6"]
    assert list(summary["runs"]["Other"][0]["batches"]) == ["2"]
    assert "outputs" not in octavo["batches"]["6"]
    (ratio,) = summary["ratios"]
    assert (ratio["peer"], ratio["num_requests"], ratio["same_outputs"]) == ("Other", 2, 1.0)
    assert "--repeats=2" in summary["command"]
    printed = capsys.readouterr().out.strip()
    assert printed in (tmp_path / "out" / "result.md").read_text()
    assert printed.count("\n") == 4


def test_cold_runs_have_an_empty_cache_of_their_own(run, stub_peers, tmp_path: Path) -> None:
    stub_peers()
    run.main(arguments(tmp_path, "--cold"))
    summary = json.loads((tmp_path / "out" / "result.json").read_text())
    caches = {results[0]["settings"]["cache"] for results in summary["runs"].values()}
    assert len(caches) == 2
    assert str(tmp_path / "cache") not in caches


def test_a_peer_that_fails_is_named_and_the_others_are_reported(
    run, stub_peers, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub_peers(other=True)
    assert run.main(arguments(tmp_path)) == 1
    summary = json.loads((tmp_path / "out" / "result.json").read_text())
    assert summary["failed"] == ["Other"]
    assert list(summary["runs"]) == ["Octavo"]
    assert "the engine broke" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--peers=nobody", "choose from octavo, other"),
        ("--prompt-len=9:8", "prompt_len"),
        ("--vocab-size=10", "vocab_size"),
    ],
)
def test_a_bad_argument_is_refused_before_anything_runs(
    run, stub_peers, tmp_path: Path, argument: str, hint: str
) -> None:
    stub_peers()
    with pytest.raises(SystemExit, match=hint):
        run.main(arguments(tmp_path, argument))
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize(("cores", "count"), [("1", 1), ("0-3", 4), ("0,2-3,7", 4)])
def test_cores_are_counted(run, cores: str, count: int) -> None:
    assert run.num_cores(cores) == count


def test_a_peer_that_is_not_set_up_says_what_to_run(peers_module, tmp_path: Path) -> None:
    known = peers_module("catalogue").catalogue(tmp_path, "smollm2-135m", ())
    assert known["octavo"].missing() is None
    assert "setup.sh" in known["vllm"].missing()


def test_the_headline_batch_is_the_published_workload(peers_module) -> None:
    from octavo.engine.simulation.workloads.bench_requests import random_workload

    made = peers_module("workload_file").make_workload(
        batch_sizes=(8, 4), prompt_len=(16, 256), output_len=(16, 128), vocab_size=49_152, seed=1
    )
    expected = random_workload(8, (16, 256), (16, 128), 49_152, 1)
    assert list(made["batches"]) == ["4", "8"]
    assert [row["prompt_token_ids"] for row in made["batches"]["8"]] == [
        list(request.prompt_token_ids) for request in expected
    ]


def test_no_prompt_is_served_twice(peers_module) -> None:
    made = peers_module("workload_file").make_workload(
        batch_sizes=(8, 4), prompt_len=(16, 64), output_len=(1, 4), vocab_size=49_152, seed=1
    )
    sections = [made["warmup"], made["prefill"], made["single"], *made["batches"].values()]
    beginnings = [tuple(row["prompt_token_ids"][:16]) for rows in sections for row in rows]
    assert len(set(beginnings)) == len(beginnings)
