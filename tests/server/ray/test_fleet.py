"""Servers on a real Ray cluster: their streams outlive them, and others take their places."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path

import pytest

from tests.server.conftest import TINY_ARGS, Process
from tests.server.ray.conftest import WAIT_S, Fleet, wait_for
from tests.server.route.test_route import LONG, answers, stream_all

pytestmark = pytest.mark.skipif(
    not os.environ.get("OCTAVO_FLEET") or importlib.util.find_spec("ray") is None,
    reason="make fleet runs it, where Ray is installed",
)


@pytest.fixture(scope="module")
def expected(live: Process) -> list[tuple[list[int], str]]:
    """What one server without Ray says to readers of long streams."""
    found = stream_all(live.grpc, lambda: None)
    assert all(len(token_ids) == LONG.max_tokens for token_ids, _ in found)
    return found


def test_answers_are_those_of_one_server(fleet: Fleet, live: Process) -> None:
    assert answers(fleet.front) == answers(live.grpc)


def test_nothing_listens_beyond_loopback(fleet: Fleet) -> None:
    sockets = set()
    for pid in fleet.processes():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(link))
            except OSError:
                continue
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.append(fields[1].rpartition(":")[0])
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "0" * 24 + "01000000"}
    assert len(listening) > 3
    assert set(listening) <= loopback


def test_servers_yield_to_no_other_process(fleet: Fleet) -> None:
    """Ray starts its workers at a niceness of 15: beside anything else on the machine servers would
    stand still."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    pids = [*fleet.servers(), *fleet.processes("ray::ServeController")]
    assert len(pids) == 3
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {own}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_streams_go_on_and_a_server_comes_for_one_that_is_lost(
    fleet: Fleet, expected: list[tuple[list[int], str]], how: signal.Signals
) -> None:
    servers, num_served = fleet.servers(), len(fleet.served())
    assert len(servers) == 2
    assert stream_all(fleet.front, lambda: os.kill(servers[0], how)) == expected
    wait_for(lambda: len(fleet.served()) > num_served)
    wait_for(lambda: len(fleet.servers()) == 2 and servers[0] not in fleet.servers())
    assert stream_all(fleet.front, lambda: None) == expected


def test_an_actor_that_is_lost_is_made_anew(fleet: Fleet) -> None:
    [actor] = fleet.processes("ray::Members")
    os.kill(actor, signal.SIGKILL)
    wait_for(lambda: fleet.processes("ray::Members") not in ([], [actor]))
    assert len(answers(fleet.front)) > 0


def test_a_model_that_is_not_there_says_so(fleet: Fleet) -> None:
    done = fleet.octavo("deploy", "--name", "gone", "--cpus-per-replica", "0.1", "/no/such/model")
    assert done.returncode == 1
    assert "gone does not start" in done.stderr
    assert "'/no/such/model' is not a path that exists" in done.stderr
    assert fleet.octavo("deploy", "--name", "gone", "--delete").returncode == 0


def test_a_server_that_is_one_too_many_drains(
    fleet: Fleet, expected: list[tuple[list[int], str]]
) -> None:
    def deploy_one() -> None:
        words = ("--replicas", "1", "--cpus-per-replica", "0.1")
        done = fleet.octavo("deploy", *words, str(fleet.model), *TINY_ARGS)
        assert done.returncode == 0, done.stderr
        assert "1 servers of" in done.stdout
        assert "octavo route --backend ray:octavo" in done.stdout

    servers, num_left = fleet.servers(), fleet.left()
    assert stream_all(fleet.front, deploy_one) == expected
    wait_for(lambda: len(fleet.servers()) == 1 and fleet.left() > num_left)
    assert set(fleet.servers()) < set(servers)


def test_servers_come_with_load_and_go_after_it(
    fleet: Fleet, expected: list[tuple[list[int], str]]
) -> None:
    rule = "saturation:least=1,most=2,high=0.4,low=0.1,every_s=2,calm_looks=2"
    words = ("--autoscale", rule, "--cpus-per-replica", "0.1")
    num_served = len(fleet.served())
    done = fleet.octavo("deploy", *words, str(fleet.model), *TINY_ARGS)
    assert done.returncode == 0, done.stderr
    wait_for(lambda: len(fleet.served()) > num_served)  # the first server that tells its load
    num_served, end_s = len(fleet.served()), time.monotonic() + WAIT_S
    while len(fleet.served()) == num_served:
        assert time.monotonic() < end_s
        assert stream_all(fleet.front, lambda: None) == expected
    wait_for(lambda: len(fleet.servers()) == 1)
    assert stream_all(fleet.front, lambda: None) == expected


# The last test: it ends the application.
def test_a_deleted_application_leaves_nothing_behind(fleet: Fleet) -> None:
    done = fleet.octavo("deploy", "--delete")
    assert (done.returncode, done.stdout) == (0, "octavo: octavo has ended\n")
    wait_for(lambda: not fleet.servers() and not fleet.processes("ray::Members"))
    done = fleet.octavo("deploy", "--delete")
    assert done.returncode == 2
    assert "an application; none runs" in done.stderr
    fleet.deploy.send_signal(signal.SIGTERM)
    wait_for(lambda: not fleet.processes())
