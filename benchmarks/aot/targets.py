"""The accelerators that kernels and steps are compiled for without having them.

Rates are the makers' own figures for one device as JAX sees it, which a program may approach and
not pass. They serve rooflines; nothing here was measured.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GIB = 1 << 30
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kind of device.

    Attributes:
        name: as on the command line.
        platform: "tpu" or "cuda".
        topology: what JAX calls the smallest slice of it.
        bytes_per_s, bf16_flops_per_s: memory bandwidth and matrix rate.
        memory_bytes: of the device.
    """

    name: str
    platform: Literal["tpu", "cuda"]
    topology: str
    bytes_per_s: float
    bf16_flops_per_s: float
    memory_bytes: int

    @property
    def package(self) -> str:
        """The Python module whose compiler it needs."""
        return "libtpu" if self.platform == "tpu" else "jax_cuda13_plugin"

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def target_config(self) -> str:
        """XLA's description of a GPU: what an H200 reports, and an H100 differs in."""
        text = (HERE / "nvidia_h200.pbtxt").read_text()
        if self.name == "h100":
            text = text.replace("H200 141GB HBM3e", "H100 80GB HBM3")
            text = text.replace(
                "memory_bandwidth: 4800000000000", "memory_bandwidth: 3352000000000"
            )
            text = text.replace(
                "device_memory_size: 151397597184", "device_memory_size: 85017493504"
            )
        return text


TARGETS = {
    target.name: target
    for target in (
        Target(
            name="v5e",
            platform="tpu",
            topology="v5e:2x2",
            bytes_per_s=819e9,
            bf16_flops_per_s=197e12,
            memory_bytes=16 * GIB,
        ),
        Target(
            name="v5p",
            platform="tpu",
            topology="v5p:2x2x1",
            bytes_per_s=2765e9,
            bf16_flops_per_s=459e12,
            memory_bytes=95 * GIB,
        ),
        Target(
            name="v6e",
            platform="tpu",
            topology="v6e:2x2",
            bytes_per_s=1640e9,
            bf16_flops_per_s=918e12,
            memory_bytes=32 * GIB,
        ),
        # JAX sees each of a chip's two halves as a device.
        Target(
            name="tpu7x",
            platform="tpu",
            topology="tpu7x:2x2x1",
            bytes_per_s=3690e9,
            bf16_flops_per_s=1153e12,
            memory_bytes=96 * GIB,
        ),
        Target(
            name="h100",
            platform="cuda",
            topology="1x1x1",
            bytes_per_s=3352e9,
            bf16_flops_per_s=989e12,
            memory_bytes=80 * GIB,
        ),
        Target(
            name="h200",
            platform="cuda",
            topology="1x1x1",
            bytes_per_s=4800e9,
            bf16_flops_per_s=989e12,
            memory_bytes=141 * 10**9,
        ),
    )
}
