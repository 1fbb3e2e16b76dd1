"""The one place that knows how JAX versions differ (0.10.2 to 0.12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh


def shard_map(
    function: Callable[..., Any], *, mesh: Mesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`jax.shard_map` without the check of replicated outputs, which loops with traced bounds fail.

    Args: as for `jax.shard_map`.
    """
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def device_kind() -> str:
    """The kind of device being compiled for: an abstract mesh's where one is set, else the host's.

    Returns:
        As `jax.Device.device_kind`: "TPU v6 lite", "NVIDIA H200", "cpu".
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return str(abstract.device_kind)
    return str(jax.devices()[0].device_kind)


def has_mosaic_gpu_kernels() -> bool:
    """Whether this JAX lowers Mosaic GPU kernels by warpgroup and interprets them (0.11 on)."""
    return jax.__version_info__ >= (0, 11)
