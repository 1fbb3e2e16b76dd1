"""What each replica gets of its host: cores, memory, GPUs."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping, Sequence

from octavo.engine.config import EngineConfig
from octavo.engine.execution.platform.available_memory import available_memory_bytes
from octavo.engine.replicas import messages


def own_cores() -> list[int]:
    """The cores that this process may run on; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def make_starts(config: EngineConfig, cores: Sequence[int]) -> list[messages.Start]:
    """What each replica is built from: its part of the host.

    Args:
        cores: that they share.
    """
    size = config.data_parallel_size
    available = available_memory_bytes()
    return [
        messages.Start(
            config=config,
            cores=tuple(part),
            host_memory_bytes=None if available is None else available // size,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        for part in split(cores, size)
    ]


def split(cores: Sequence[int], size: int) -> list[Sequence[int]]:
    """Cores in `size` parts, neighbours together, no part more than one larger than another; all
    parts are empty if there are fewer cores than that."""
    if len(cores) < size:
        return [()] * size
    edges = [len(cores) * index // size for index in range(size + 1)]
    return [cores[low:high] for low, high in itertools.pairwise(edges)]


def devices_of(index: int, num_devices: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What makes a replica see its own GPUs alone. It means nothing where there are none."""
    name = "CUDA_VISIBLE_DEVICES"
    wanted = range(index * num_devices, (index + 1) * num_devices)
    if environ.get(name) is None:
        return {name: ",".join(map(str, wanted))}
    visible = [each for each in environ[name].split(",") if each]
    return {name: ",".join(visible[wanted.start : wanted.stop])}
