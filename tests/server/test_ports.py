"""A taken port is one clear error, and nothing beside it."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys

import pytest

from octavo.server.file_limit import LEAST, most_connections
from octavo.server.ports import check_bindable


@pytest.fixture
def taken():
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.mark.parametrize("option", ["--grpc-port", "--http-port"])
def test_a_taken_port_is_one_line_on_standard_error(taken, option):
    other = {"--grpc-port": "--http-port", "--http-port": "--grpc-port"}[option]
    command = [sys.executable, "-m", "octavo.server.cli.main", "serve", option, str(taken)]
    done = subprocess.run(
        [*command, other, "0"], capture_output=True, text=True, timeout=120,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode != 0
    [line] = done.stderr.splitlines()
    assert option.strip("-").replace("-", "_") in line
    assert f"127.0.0.1:{taken}" in line


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_that_somebody_listens_on_is_taken(taken, host):
    with pytest.raises(OSError, match="in use"):
        check_bindable(host, taken)
    check_bindable(host, 0)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_an_address_of_nobody_here_cannot_be_bound(host):
    with pytest.raises(OSError):
        check_bindable(host, 0)


def test_connections_are_as_many_as_descriptors_allow():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert most_connections(8192) == 256
        assert most_connections(100) == 100
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        assert LEAST <= most_connections(8192) <= 50
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


LIMITS = """
import resource
from octavo.engine.process.file_limit import raise_file_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 4096)))
assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 4096)
"""


def test_the_soft_limit_is_raised_to_the_hard_one():
    subprocess.run([sys.executable, "-c", LIMITS], check=True, timeout=60)
