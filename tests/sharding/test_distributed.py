"""Two real processes find each other and compute together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from octavo.sharding import distributed

PROGRAM = """
import os
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from octavo.sharding import distributed
from octavo.sharding.mesh import make_mesh

def listening():
    # The addresses, as the kernel writes them, that somebody listens on at the coordinator's port.
    port = os.environ["OCTAVO_COORDINATOR"].rpartition(":")[2]
    for name in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{name}") as table:
            for line in table.readlines()[1:]:
                address, state = line.split()[1], line.split()[3]
                if state == "0A" and int(address.split(":")[1], 16) == int(port):
                    yield address.split(":")[0]

assert distributed.initialize()
mesh = make_mesh(2)
sharding = NamedSharding(mesh, PartitionSpec("tensor"))
ones = jax.make_array_from_callback((4,), sharding, lambda index: np.ones(4, np.float32)[index])
whole = NamedSharding(mesh, PartitionSpec())
total = jax.jit(lambda x: x.sum(), out_shardings=whole)(ones)
if jax.process_index() == 0:
    print("listens", *listening())
print(jax.process_count(), len(mesh.local_devices), float(total.addressable_data(0)))
"""


def test_two_processes_share_one_mesh():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for index in range(2):
        env = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OCTAVO_COORDINATOR": f"127.0.0.1:{port}",
            "OCTAVO_NUM_PROCESSES": "2",
            "OCTAVO_PROCESS_ID": str(index),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120) for process in processes]
    for process, (out, err) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, err[-2000:]
        assert out.splitlines()[-1] == "2 1 4.0"  # gloo prints lines of its own first
    if os.path.exists("/proc/self/net/tcp"):
        ipv4, mapped = "0100007F", "0000000000000000FFFF00000100007F"
        (listens,) = [
            line.split()[1:] for line in outputs[0][0].splitlines() if line.startswith("listens")
        ]
        assert set(listens) <= {ipv4, mapped}
        assert listens


@pytest.mark.parametrize("address", ["host", ":80", "host:", "host:0", "host:x", "host:70000"])
def test_an_address_without_host_or_port_is_refused_before_anything_starts(address):
    with pytest.raises(ValueError, match=r"coordinator_address = .* host:port"):
        distributed.initialize(address, 2, 0, {})
    environ = {"OCTAVO_COORDINATOR_BIND": address}
    with pytest.raises(ValueError, match=r"coordinator_bind_address = .* host:port"):
        distributed.initialize("127.0.0.1:1", 2, 0, environ)
