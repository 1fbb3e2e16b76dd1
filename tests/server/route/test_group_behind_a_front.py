"""No stream is lost when a group of hosts ends, if a front has another server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.engine.hosts.leader import LOST_STATUS
from tests.server.conftest import TINY_ARGS, Process
from tests.server.route.test_route import LONG, ServerProcess, front_process, stream_all
from tests.waiting import until


@pytest.mark.skipif(not os.environ.get("OCTAVO_MULTIHOST"), reason="make multihost runs it")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_streams_of_a_group_go_on_elsewhere(
    tiny_model: Path,
    server_process: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: signal.Signals,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # One device a process: tests have four.
    flags = os.environ.get("XLA_FLAGS", "").split()
    monkeypatch.setenv("XLA_FLAGS", " ".join(each for each in flags if "count" not in each))
    args = ("--model", str(tiny_model), *TINY_ARGS)
    of_group = (
        *("--tensor-parallel-size", "2", "--num-hosts", "2"),
        *("--coordinator", f"127.0.0.1:{port - 1}"),
    )
    command = [sys.executable, "-m", "octavo.server.cli.main", "serve", *args, *of_group]
    follower = subprocess.Popen([*command, "--host-id", "1"], stderr=subprocess.DEVNULL)
    group: Process
    try:
        with (
            server_process(*args, log=tmp_path / "alone") as alone,
            server_process(*args, *of_group, "--host-id", "0", log=tmp_path / "group") as group,
            front_process(tiny_model, tmp_path / "front", [group.grpc, alone.grpc]) as front,
        ):
            expected = stream_all(alone.grpc, lambda: None)
            assert all(len(token_ids) == LONG.max_tokens for token_ids, _ in expected)
            until(lambda: (tmp_path / "front").read_text().count(" serves") >= 2)
            assert stream_all(front.grpc, lambda: follower.send_signal(how)) == expected
            assert group.popen.wait(30) == LOST_STATUS
            assert "the group of hosts ends: host 1 is lost" in (tmp_path / "group").read_text()
    finally:
        follower.kill()
        follower.wait()
