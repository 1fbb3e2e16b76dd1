"""The device mesh every array of Octavo lives on."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

DATA_AXIS = "data"
"""Mesh axis of replicas; 1 in an engine of its own."""

TENSOR_AXIS = "tensor"
"""Mesh axis that attention heads, MLP features and the vocabulary are split over."""


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of shape (data = 1, tensor = `tensor_parallel_size`) with automatic axes.

    Args:
        tensor_parallel_size: devices that share each layer, ≥ 1.
        devices: candidates, of which the first are taken; None takes all that JAX sees.

    Raises:
        ValueError: the size is below 1 or above the number of devices.
    """
    available = list(jax.devices() if devices is None else devices)
    if not 1 <= tensor_parallel_size <= len(available):
        raise ValueError(
            f"tensor_parallel_size = {tensor_parallel_size!r} is not allowed: "
            f"1 to {len(available)}, the number of devices there are"
        )
    grid = np.array(available[:tensor_parallel_size], dtype=object).reshape(1, -1)
    return Mesh(grid, (DATA_AXIS, TENSOR_AXIS), axis_types=(AxisType.Auto, AxisType.Auto))


def platform() -> str:
    """Kind of the devices that JAX sees: "cpu", "gpu" or "tpu"."""
    return str(jax.devices()[0].platform)


def tensor_parallel_size(mesh: Mesh) -> int:
    """How many devices share each layer on `mesh`."""
    return int(mesh.shape[TENSOR_AXIS])
