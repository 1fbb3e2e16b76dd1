"""Start of a run that spans several hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax

COORDINATOR_ENV = "OCTAVO_COORDINATOR"
COORDINATOR_BIND_ENV = "OCTAVO_COORDINATOR_BIND"
NUM_PROCESSES_ENV = "OCTAVO_NUM_PROCESSES"
PROCESS_ID_ENV = "OCTAVO_PROCESS_ID"
SHUTDOWN_S = 5


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    environ: Mapping[str, str] | None = None,
    *,
    coordinator_bind_address: str | None = None,
) -> bool:
    """Join the other hosts, if there are any. Call it before anything touches a device.

    Arguments win over the environment (`OCTAVO_COORDINATOR`, `OCTAVO_NUM_PROCESSES`,
    `OCTAVO_PROCESS_ID`, `OCTAVO_COORDINATOR_BIND`). With none of them, or with one
    process, nothing is done.

    Args:
        coordinator_address: "host:port" of process 0, reachable from all.
        num_processes: how many processes take part.
        process_id: this one's number, 0 ≤ id < num_processes.
        environ: the environment to read; None reads the process's own.
        coordinator_bind_address: "host:port" that process 0 listens on; None takes
            `coordinator_address`. Whoever reaches it can join the run and needs no token. It has to
            be given where the others reach process 0 by an address that its host does not have
            (a Kubernetes service, for one).

    Returns:
        Whether this process is now one of several.

    Raises:
        ValueError: an argument is missing or out of range.
    """
    env = os.environ if environ is None else environ
    address = coordinator_address or env.get(COORDINATOR_ENV) or None
    count = num_processes if num_processes is not None else _integer(env, NUM_PROCESSES_ENV)
    index = process_id if process_id is not None else _integer(env, PROCESS_ID_ENV)
    if count is None and address is None and index is None:
        return False
    if count is None or count < 1:
        raise ValueError(f"num_processes = {count!r} is not allowed: an integer of at least 1")
    if count == 1:
        return False
    address = _host_and_port("coordinator_address", address)
    bind = coordinator_bind_address or env.get(COORDINATOR_BIND_ENV) or address
    bind = _host_and_port("coordinator_bind_address", bind)
    if index is None or not 0 <= index < count:
        raise ValueError(f"process_id = {index!r} is not allowed: 0 to {count - 1}")
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=count,
        process_id=index,
        # JAX would listen on every interface of the host.
        coordinator_bind_address=bind,
        # Slurm's would leave it one device of its host.
        cluster_detection_method="deactivate",
        # A process that ends waits for the others, which may never come.
        shutdown_timeout_seconds=SHUTDOWN_S,
    )
    return True


def _host_and_port(name: str, address: str | None) -> str:
    host, _, port = (address or "").rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16):
        raise ValueError(f"{name} = {address!r} is not allowed: host:port")
    assert address is not None
    return address


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} = {text!r} is not allowed: an integer") from None
