"""The device suite runs from end to end on small shapes, and finds what it is to find."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

SECTIONS = "roofs,checks,kernels,hot kernels,sampling,steps,experts,peer decode"
"""All but `families` and `serving`, which take minutes, and peers of whole models."""


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.device.{name}")


def test_the_suite_checks_and_measures_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "device_suite.py"), "--tiny", "--output",
         str(tmp_path / "tiny"), "--sections", SECTIONS],
        capture_output=True, text=True, check=False, timeout=600, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "tiny.json").read_text())
    assert results["copy_bytes_per_s"] > 0
    sections = results["sections"]
    assert all(row["ok"] for row in sections["checks"]["rows"])
    assert [row["ok"] for row in sections["experts"]["rows"]] == [True, True]
    assert [row["what"] for row in sections["kernels"]["rows"]][-1] == "prefill 16 x 48"
    steps = {row["what"]: row for row in sections["steps"]["rows"]}
    assert steps["decode 4 x 64"]["dispatches"] > 0
    assert steps["prefill in chunks of 32, up to 128"]["dispatches"] == 8
    assert steps["mixed 4 rows, 12 prefill tokens"]["dispatches"] > 0
    for how in ("greedy", "temperature 1.0, top_p 0.95"):
        assert steps[f"6 requests of 16 + 8, {how}"]["output tok/s"] > 0
    assert {row["what"] for row in sections["sampling"]["rows"]} >= {
        f"top_k 50, branches in the {where}" for where in ("host", "graph")
    }
    # Without PyTorch, or without a GPU under it, that is what the report says.
    assert "no peer is measured" in sections["peer decode"]["skipped"]
    text = (tmp_path / "tiny.md").read_text()
    assert "## kernels" in text
    assert results["command"] in text


def test_a_wrong_kernel_fails_its_check(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = load("checks")
    right = checks.ragged_paged_attention

    def one_number_off(*args: Any, backend: str, **rest: Any) -> Any:
        out, kv = right(*args, backend=backend, **rest)
        return (out.at[0, 0, 0].add(1.0) if backend == "xla" else out), kv

    monkeypatch.setattr(checks, "ragged_paged_attention", one_number_off)
    row = checks._one(np.random.default_rng(0), "xla", "float32", "idle", (2, 1), 16, 16, {})
    assert not row["ok"]
    assert row["worst"] == pytest.approx(1.0, abs=1e-3)


def test_results_survive_a_section_that_fails_and_one_that_is_too_slow(
    load: Callable[[str], Any], tmp_path: Path
) -> None:
    report = load("report")

    def slow(results: dict[str, Any], deadline_s: float) -> Iterator[dict[str, Any]]:
        for index in range(100):
            yield {"what": f"row {index}"}
            time.sleep(max(0.0, deadline_s - time.monotonic()))

    def broken(results: dict[str, Any], deadline_s: float) -> Iterator[dict[str, Any]]:
        yield {"what": "first", "value": 1.25}
        raise RuntimeError("out of registers")

    suite = report.Report({"device": "none"}, tmp_path / "out", budget_s=100.0)
    suite.run(report.Section("slow", slow, 0.05))
    suite.run(report.Section("broken", broken, 50))
    results = json.loads((tmp_path / "out.json").read_text())["sections"]
    assert [row["what"] for row in results["slow"]["rows"]] == ["row 0", "row 1"]
    assert "stopped after" in results["slow"]["cut"]
    assert results["broken"]["rows"] == [{"what": "first", "value": 1.25}]
    assert "out of registers" in results["broken"]["failed"]
    assert not suite.ok
    assert "| first | 1.25 |" in (tmp_path / "out.md").read_text()


def test_no_section_begins_without_time(load: Callable[[str], Any], tmp_path: Path) -> None:
    report = load("report")
    suite = report.Report({}, tmp_path / "out", budget_s=1.0)
    suite.run(report.Section("late", lambda results, deadline_s: 1 / 0, 60))
    assert "of the budget were left" in suite.results["sections"]["late"]["skipped"]
    assert suite.ok
