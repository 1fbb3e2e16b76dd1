"""What KV pages are made of, and how many bytes they may take of what devices or host have left."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.sharding import Mesh

from octavo.engine.config import EngineConfig
from octavo.engine.execution.platform.available_memory import available_memory_bytes
from octavo.engine.execution.platform.traits import traits_of
from octavo.pallas_kernels.ragged_paged_attention.kv_dtype import KV_DTYPES

BUDGET_BITS, CPU_BUDGET_BITS = 6, 2
"""Binary digits of a pool's size that free memory decides: on a CPU, whose memory others use too,
so few that a start finds its programs though somebody takes a tenth more."""
CPU_KV_BYTES = 2 << 30
"""Most bytes of KV taken unasked on a CPU, whose memory others use too."""
CPU_MEMORY_SHARE = 0.25


def requested_kv_dtype(config: EngineConfig, dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of keys and values that a configuration asks for, with activations of `dtype`."""
    return dtype if config.kv_cache_dtype == "auto" else KV_DTYPES[config.kv_cache_dtype]


def kv_budget_bytes(
    config: EngineConfig, mesh: Mesh, unread_bytes: int, host_memory_bytes: int | None
) -> int:
    """Bytes for KV over all devices of the mesh: those that were asked for, or a part of the rest.

    Args:
        unread_bytes: of weights in the host's memory that are still to be read. Weights on devices
            of their own memory are there by now.
        host_memory_bytes: of the host's memory; None takes what is available.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if traits_of(mesh).in_host_memory:
        free = int(CPU_MEMORY_SHARE * max(0, _host_bytes(host_memory_bytes) - unread_bytes))
        return CPU_KV_BYTES if free >= CPU_KV_BYTES else coarsely(free, CPU_BUDGET_BITS)
    stats = mesh.local_devices[0].memory_stats() or {}
    limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    free = math.floor(limit * config.gpu_memory_utilization) - used
    # Activations and logits of the largest step, generously.
    return coarsely(max(0, free - limit // 20)) * mesh.size


def has_room_for(num_bytes: int, host_memory_bytes: int | None = None) -> bool:
    """Whether a host that holds so many more bytes has room for a whole KV pool still.

    Args:
        host_memory_bytes: of the host's memory; None takes what is available.
    """
    free = _host_bytes(host_memory_bytes) - num_bytes
    return free >= 0 and int(CPU_MEMORY_SHARE * free) >= CPU_KV_BYTES


def coarsely(num_bytes: int, num_digits: int = BUDGET_BITS) -> int:
    """Rounded down to so many binary digits: with six, at most 3% less.

    The pool's size is part of every program: were it to follow free memory to the byte, no two
    starts would find each other's programs in the compile cache.
    """
    step = 1 << max(0, num_bytes.bit_length() - num_digits)
    return num_bytes // step * step


def _host_bytes(given: int | None) -> int:
    """Memory that the host has left; where it does not say, little is taken."""
    available = available_memory_bytes() if given is None else given
    return CPU_KV_BYTES if available is None else available
