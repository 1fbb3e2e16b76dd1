"""A process finds its place in a group, or says what is wrong with what it was told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.hosts.hosts_config import HostsConfig

LOOPBACK: dict[str, Any] = {"coordinator": "127.0.0.1:7000", "num_hosts": 2, "host_id": 1}

LWS = {"LWS_LEADER_ADDRESS": "pod-0.svc", "LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"}
TPU = {"TPU_WORKER_HOSTNAMES": "t0,t1", "TPU_WORKER_ID": "1"}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_JOB_ID": "5",
    "SLURM_STEP_NODELIST": "gpu-[07-09,12],login",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (LWS, ("pod-0.svc:8476", 4, 2)),
        (TPU, ("t0:8476", 2, 1)),
        (SLURM, ("gpu-07:61450", 3, 0)),
        (SLURM | {"SLURM_STEP_NODELIST": "n1,n2"}, ("n1:61450", 3, 0)),
        (SLURM | {"SLURM_STEP_NODELIST": "rack[2-3]-gpu"}, ("rack2-gpu:61450", 3, 0)),
        (SLURM | {"SLURM_STEP_NODELIST": "solo"}, ("solo:61450", 3, 0)),
        (LWS | TPU | SLURM, ("pod-0.svc:8476", 4, 2)),
    ],
)
def test_a_place_is_found_in_the_environment(
    environ: dict[str, str], place: tuple[str, int, int]
) -> None:
    found = HostsConfig().found(environ, tensor_parallel_size=4)
    assert (found.coordinator, found.num_hosts, found.host_id) == place
    assert found.is_leader is (place[2] == 0)
    assert found.is_group


@pytest.mark.parametrize(
    ("given", "environ", "tensor_parallel_size"),
    [
        ({}, {}, 4),
        ({}, LWS, 1),  # engines of one device each
        ({"num_hosts": 1}, LWS, 4),  # told that it is alone
        ({}, LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, 4),
        ({}, {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, 4),
        ({}, {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0"}, 4),  # not started by srun
    ],
)
def test_a_process_is_alone_where_nothing_says_otherwise(
    given: dict[str, Any], environ: dict[str, str], tensor_parallel_size: int
) -> None:
    found = HostsConfig(**given).found(environ, tensor_parallel_size)
    assert not found.is_group
    assert found.is_leader


def test_what_was_told_wins_over_the_environment() -> None:
    config = HostsConfig(**LOOPBACK)
    assert config.found(LWS, 4) == config
    assert config.log_address == ("127.0.0.1", 7001)
    assert not config.is_leader


def test_a_contradictory_environment_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfigError, match="LWS_GROUP_SIZE = 'many'"):
        HostsConfig().found(LWS | {"LWS_GROUP_SIZE": "many"}, 4)
    with pytest.raises(InvalidConfigError, match="TPU_WORKER_ID = None"):
        HostsConfig().found({"TPU_WORKER_HOSTNAMES": "a,b"}, 4)
    with pytest.raises(InvalidConfigError, match=r"host_id = 7 .* 0 to 3"):
        HostsConfig().found(LWS | {"LWS_WORKER_INDEX": "7"}, 4)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"coordinator": "nobody"}, "coordinator"),
        ({"coordinator": ":80"}, "coordinator"),
        ({"coordinator": "host:65535"}, "coordinator"),
        ({"coordinator_bind": "host:x"}, "coordinator_bind"),
        ({"num_hosts": 0}, "num_hosts"),
        ({"num_hosts": None}, "num_hosts"),
        ({"host_id": 2}, "host_id"),
        ({"host_id": None}, "host_id"),
        ({"host_id": -1}, "host_id"),
        ({"coordinator": None}, "host_id"),
        ({"coordinator": None, "host_id": None}, "num_hosts"),
        ({"hosts_timeout_s": 0.0}, "hosts_timeout_s"),
        ({"hosts_start_s": float("nan")}, "hosts_start_s"),
    ],
)
def test_what_cannot_be_a_place_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfigError) as raised:
        HostsConfig(**{**LOOPBACK, **changes})
    assert raised.value.field == field


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "localhost:7000", "[::1]:7000"])
def test_no_token_is_needed_on_a_loopback_address(address: str) -> None:
    assert HostsConfig(**{**LOOPBACK, "coordinator": address}).token() == b""


@pytest.mark.parametrize(
    "changes",
    [{"coordinator": "10.0.0.1:7000"}, {"coordinator_bind": "0.0.0.0:7000"}],
)
def test_a_token_is_needed_elsewhere(changes: dict[str, Any], tmp_path: Path) -> None:
    config = HostsConfig(**{**LOOPBACK, **changes})
    with pytest.raises(InvalidConfigError, match="hosts_token_file = None"):
        config.token()
    file = tmp_path / "token"
    config = HostsConfig(**{**LOOPBACK, **changes, "hosts_token_file": str(file)})
    with pytest.raises(InvalidConfigError, match="a readable file"):
        config.token()
    file.write_text("short\n")
    with pytest.raises(InvalidConfigError, match="at least 16 characters"):
        config.token()
    file.write_text("0123456789abcdef\nmore\n")
    assert config.token() == b"0123456789abcdef"
