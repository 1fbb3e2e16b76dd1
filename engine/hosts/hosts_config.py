"""Which host of a group a process is and where its leader is: told, or found in its environment.

No socket is opened here and no JAX imported.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.engine.errors import InvalidConfigError

COORDINATOR_PORT = 8476
"""Of a coordinator that was found by its host's name alone; the command log has the next one."""
LEAST_TOKEN_CHARS = 16
_SLURM_PORTS = range(61440, 65536, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsConfig:
    """A process's place in a group of hosts. Immutable; checked on construction.

    Attributes:
        coordinator: "host:port" of host 0, as the others reach it. JAX's coordinator listens there
            and the command log at the next port. None, without num_hosts, looks in the environment
            of LeaderWorkerSet, of a TPU pod and of Slurm if tensor_parallel_size is above 1.
        coordinator_bind: "host:port" that host 0 listens on, where that is not `coordinator`.
        num_hosts: processes that share one engine; 1 is this one alone, and looks for no others.
        host_id: which of them this one is, 0 to num_hosts - 1; host 0 plans and serves.
        hosts_token_file: file whose first line is a secret of the group, of at least 16 characters.
            Needed unless the coordinator is a loopback address.
        hosts_timeout_s: seconds of silence after which another host counts as dead.
        hosts_step_s: seconds in one step after which hosts count as waiting for each other for
            ever, and the group ends. Longer than any step.
        hosts_start_s: seconds in which all hosts must have come.
    """

    coordinator: str | None = None
    coordinator_bind: str | None = None
    num_hosts: int | None = None
    host_id: int | None = None
    hosts_token_file: str | None = None
    hosts_timeout_s: float = 3.0
    hosts_step_s: float = 60.0
    hosts_start_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("coordinator", "coordinator_bind"):
            value = getattr(self, name)
            if value is not None:
                host_and_port(name, value)
        if self.num_hosts is not None and not 1 <= self.num_hosts <= 4096:
            raise InvalidConfigError("num_hosts", self.num_hosts, "an integer from 1 to 4096")
        for name in ("hosts_timeout_s", "hosts_step_s", "hosts_start_s"):
            if not 0 < getattr(self, name) < 1e6:
                raise InvalidConfigError(name, getattr(self, name), "a number of seconds above 0")
        if self.coordinator is None and self.host_id is not None:
            raise InvalidConfigError("host_id", self.host_id, "given together with coordinator")
        if self.coordinator is None and (self.num_hosts or 1) > 1:
            raise InvalidConfigError("num_hosts", self.num_hosts, "given together with coordinator")
        if self.coordinator is not None and self.num_hosts is None:
            raise InvalidConfigError("num_hosts", None, "given together with coordinator")
        if self.is_group and not 0 <= (-1 if self.host_id is None else self.host_id) < self.size:
            raise InvalidConfigError("host_id", self.host_id, f"0 to {self.size - 1}")

    @property
    def size(self) -> int:
        """Hosts of the group."""
        return self.num_hosts or 1

    @property
    def is_group(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    @property
    def is_leader(self) -> bool:
        """Whether this host plans and serves."""
        return not self.host_id

    @property
    def bind(self) -> tuple[str, int]:
        """Host and port that JAX's coordinator listens on, on host 0."""
        return host_and_port("coordinator_bind", self.coordinator_bind or self.coordinator or "")

    @property
    def log_bind(self) -> tuple[str, int]:
        """Host and port that the command log listens on, on host 0."""
        host, port = self.bind
        return host, port + 1

    @property
    def log_address(self) -> tuple[str, int]:
        """Host and port at which followers reach the command log."""
        host, port = host_and_port("coordinator", self.coordinator or "")
        return host, port + 1

    def token(self) -> bytes:
        """The group's secret; empty if there is none and none is needed.

        Raises:
            InvalidConfigError: there has to be one, or the file holds none that will do.
        """
        if self.hosts_token_file is None:
            if all(map(_is_loopback, (self.log_address[0], self.log_bind[0]))):
                return b""
            raise InvalidConfigError(
                "hosts_token_file", None, "given, unless the coordinator is a loopback address"
            )
        try:
            lines = Path(self.hosts_token_file).expanduser().read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            allowed = f"a readable file ({error})"
            raise InvalidConfigError("hosts_token_file", self.hosts_token_file, allowed) from error
        token = lines[0].strip() if lines else ""
        if len(token) < LEAST_TOKEN_CHARS:
            allowed = f"a file whose first line has at least {LEAST_TOKEN_CHARS} characters"
            raise InvalidConfigError("hosts_token_file", self.hosts_token_file, allowed)
        return token.encode()

    def found(self, environ: Mapping[str, str], tensor_parallel_size: int) -> HostsConfig:
        """This place, or the one that the environment tells of if none was given.

        Args:
            environ: of the process.
            tensor_parallel_size: devices that share each layer. Engines of one device are never a
                group's, whatever else their scheduler started together.

        Raises:
            InvalidConfigError: variables that contradict each other.
        """
        if self.coordinator is not None or self.num_hosts is not None or tensor_parallel_size == 1:
            return self
        for find in (_of_leader_worker_set, _of_tpu_pod, _of_slurm):
            place = find(environ)
            if place is not None and place[1] > 1:
                address, size, index = place
                return dataclasses.replace(self, coordinator=address, num_hosts=size, host_id=index)
        return self


def host_and_port(name: str, address: str) -> tuple[str, int]:
    """The parts of "host:port"; an IPv6 address stands in brackets.

    Raises:
        InvalidConfigError: it is none, or leaves no port above it.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65535):
        raise InvalidConfigError(name, address, "host:port, with a port from 1 to 65534")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_Place = tuple[str, int, int]
"""A coordinator's address, how many hosts there are, and which one this is."""


def _of_leader_worker_set(environ: Mapping[str, str]) -> _Place | None:
    """Of a pod of a Kubernetes LeaderWorkerSet, which tells each of its leader."""
    if "LWS_LEADER_ADDRESS" not in environ:
        return None
    size, index = _numbers(environ, "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    return f"{environ['LWS_LEADER_ADDRESS']}:{COORDINATOR_PORT}", size, index


def _of_tpu_pod(environ: Mapping[str, str]) -> _Place | None:
    """Of a host of a TPU slice, as GKE and the TPU runtime describe it."""
    names = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    if len(names) < 2:
        return None
    (index,) = _numbers(environ, "TPU_WORKER_ID")
    return f"{names[0]}:{COORDINATOR_PORT}", len(names), index


def _of_slurm(environ: Mapping[str, str]) -> _Place | None:
    """Of a task that `srun` started. Jobs that share a node get ports of their own."""
    if "SLURM_STEP_NUM_TASKS" not in environ:
        return None
    size, index, job = _numbers(environ, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_JOB_ID")
    name = _first_node(environ.get("SLURM_STEP_NODELIST", ""))
    return f"{name}:{_SLURM_PORTS[job % len(_SLURM_PORTS)]}", size, index


def _first_node(nodes: str) -> str:
    """The first name of a list as Slurm writes it: gpu-07 of "gpu-[07-09,12],login"."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^,]*)", nodes)
    if match is None:
        raise InvalidConfigError("SLURM_STEP_NODELIST", nodes, "names of nodes")
    return f"{match[1]}{match[2] or ''}{match[3]}"


def _numbers(environ: Mapping[str, str], *names: str) -> list[int]:
    found = []
    for name in names:
        try:
            found.append(int(environ[name]))
        except (KeyError, ValueError) as error:
            raise InvalidConfigError(name, environ.get(name), "an integer") from error
    return found
