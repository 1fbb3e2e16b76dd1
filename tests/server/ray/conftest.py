"""A local Ray cluster with servers of the tiny model on it, and a front over them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.conftest import START_S, TINY_ARGS, read_lines

MARK = "OCTAVO_TEST_FLEET"
WAIT_S = 120.0
"""For what a busy machine does: a server starts in some 20 s."""


def wait_for(condition: Callable[[], bool]) -> None:
    """Waits until it holds."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.1)


@dataclass
class Fleet:
    """A cluster of this machine, and a front.

    Attributes:
        deploy: the process of `octavo deploy`, whose end is the cluster's.
        front: address of the front's gRPC services.
        log: of the front.
        environ: of every process of the cluster, with a mark by which they are found.
        model: that is served.
    """

    deploy: subprocess.Popen[str]
    front: str
    log: Path
    environ: dict[str, str]
    model: Path

    def processes(self, *words: str) -> list[int]:
        """The cluster's processes whose command line holds these words."""
        mark = f"{MARK}={self.environ[MARK]}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes():
                    line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if all(word in line for word in words):
                        found.append(int(folder.name))
        return found

    def servers(self) -> list[int]:
        """Processes of `octavo serve`."""
        return self.processes("octavo.server.cli.main serve")

    def served(self) -> list[str]:
        """Addresses of the servers that the front ever took in, in their order."""
        lines = self.log.read_text().splitlines()
        return [line.split()[-2] for line in lines if line.endswith(" serves")]

    def left(self) -> int:
        """How many servers the front ever let go."""
        return self.log.read_text().count("is no server of this front any more")

    def octavo(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a command beside the cluster."""
        return subprocess.run(
            [sys.executable, "-m", "octavo.server.cli.main", *words],
            capture_output=True, text=True, check=False, env=self.environ, timeout=START_S,
        )  # fmt: skip


@contextlib.contextmanager
def start_fleet(model: Path, log: Path, *options: str) -> Iterator[Fleet]:
    """`octavo deploy` with these options and its front, from ready until the block's end."""
    with tempfile.TemporaryDirectory(prefix="octavo-ray-", dir="/tmp") as scratch:
        # Sockets have short names, and the token must not be the user's own.
        environ = {
            **os.environ, MARK: uuid.uuid4().hex, "RAY_TMPDIR": scratch, "HOME": scratch,
            "RAY_enable_metrics_collection": "0",
            "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
        }  # fmt: skip
        route = "--grpc-port 0 --backend-timeout-s 4 --log-level info"
        command = [sys.executable, "-m", "octavo.server.cli.main", "deploy", "--start-cluster"]
        command += ["--cpus-per-replica", "0.1", *options, "--route", route, str(model), *TINY_ARGS]
        with log.open("w") as stderr:
            deploy = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ
            )
        fleet = Fleet(deploy, "", log, environ, model)
        try:
            assert deploy.stdout is not None
            lines = read_lines(deploy.stdout, 2)
            run, front = lines.get(timeout=START_S), lines.get(timeout=START_S)
            assert "run" in run, log.read_text()
            assert "gRPC" in front, log.read_text()
            fleet.front = front.split()[-1]
            yield fleet
        finally:
            deploy.send_signal(signal.SIGTERM)
            try:
                deploy.communicate(timeout=WAIT_S)
            finally:
                for pid in fleet.processes():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two servers and a front; tests leave two serving."""
    log = tmp_path_factory.mktemp("fleet") / "log"
    with start_fleet(tiny_model, log, "--replicas", "2") as running:
        wait_for(lambda: len(running.served()) == 2)
        yield running
