"""A server that is the child of another process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.client import OctavoClient
from octavo.engine.errors import EngineDeadError
from octavo.server.ray.server_process import ServerProcess
from tests.server.conftest import START_S, TINY_ARGS, read_lines

PARENT = """
import sys, time
from octavo.server.ray.server_process import ServerProcess
server = ServerProcess(sys.argv[1:])
print(server.pid, server.address(), flush=True)
time.sleep(1000)
"""
WAIT_S = 60.0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_it_ends_with_its_parent_however_that_ends(tiny_model: Path, how: signal.Signals) -> None:
    words = ["--quiet", "--model", str(tiny_model), *TINY_ARGS, "--grpc-port", "0"]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    try:
        assert parent.stdout is not None
        pid, address = read_lines(parent.stdout, 1).get(timeout=START_S).split()
        with OctavoClient(address) as client:
            assert client.model_info().model == "tiny"
        assert is_running(int(pid))
        parent.send_signal(how)
        end_s = time.monotonic() + WAIT_S
        while is_running(int(pid)):
            assert time.monotonic() < end_s
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.communicate()


def test_it_drains_when_it_is_told_to_end(tiny_model: Path) -> None:
    server = ServerProcess(["--quiet", "--model", str(tiny_model), *TINY_ARGS, "--grpc-port", "0"])
    address = server.address(START_S)
    assert server.status is None
    with OctavoClient(address) as client:
        assert client.load().standing.num_rows == 8
    server.end(WAIT_S)
    assert server.status == os.EX_OK


def test_one_that_does_not_start_says_why(tmp_path: Path) -> None:
    server = ServerProcess(["--model", str(tmp_path)])
    with pytest.raises(EngineDeadError, match=r"ended with status 1: .* has no config\.json"):
        server.address(START_S)
