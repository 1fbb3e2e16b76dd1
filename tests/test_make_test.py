"""What `make test` does when one of its processes dies, as it does when memory runs out."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PASSING = """
import pytest, time

@pytest.mark.parametrize("i", range(4))
def test_that_passes(i):
    time.sleep(0.1)
"""
DYING = """
import os, signal

def test_before():
    pass

def test_that_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_after():
    pass
"""
ENDS_WITHIN_S = 120
"""A bound on a run that hung for ever; it takes some five seconds."""


def pytest_options() -> list[str]:
    """What the Makefile hands to pytest, with two processes."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    printed = subprocess.run(
        ["make", "-n", "test", "TEST_WORKERS=2", "PYTEST_ARGS="],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    (line,) = [line for line in printed.splitlines() if " -m pytest " in line]
    return shlex.split(line.partition(" -m pytest ")[2])


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_dead_worker_fails_the_run_by_the_name_of_its_test(tmp_path: Path, place: str) -> None:
    files = [f"test_{name}.py" for name in "abcde"]
    for name in files:
        (tmp_path / name).write_text(PASSING)
    dying = files[0 if place == "first" else -1]
    (tmp_path / dying).write_text(DYING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:asyncio", *pytest_options()],
        cwd=tmp_path, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False,
    )  # fmt: skip
    assert run.returncode == 1, run.stdout
    assert f"FAILED {dying}::test_that_dies" in run.stdout
    assert run.stdout.count("crashed while running") >= 1
    assert "worker restarting disabled" in run.stdout
