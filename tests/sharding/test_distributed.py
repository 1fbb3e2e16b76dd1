"""Two real processes find each other and compute together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

PROGRAM = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from octavo.sharding import distributed
from octavo.sharding.mesh import make_mesh

assert distributed.initialize()
mesh = make_mesh(2)
sharding = NamedSharding(mesh, PartitionSpec("tensor"))
ones = jax.make_array_from_callback((4,), sharding, lambda index: np.ones(4, np.float32)[index])
whole = NamedSharding(mesh, PartitionSpec())
total = jax.jit(lambda x: x.sum(), out_shardings=whole)(ones)
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
