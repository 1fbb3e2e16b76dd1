"""Hopper GPUs: their names, and what kernels for them share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

HOPPER = ("H100", "H200", "GH200", "H20", "H800")
"""In JAX's names of their kinds."""
SMEM_BYTES = 232_448
"""Shared memory of one block on Hopper."""
MULTIPROCESSOR_SMEM_BYTES = 233_472
"""Of all blocks on a multiprocessor, each with a kilobyte more than it asks for."""
NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200 on a board; see `num_multiprocessors`."""
_FEWER = {"PCIe": 114, "H20": 78}


def is_hopper(device_kind: str) -> bool:
    """Whether a kind of device, as JAX names it, is one."""
    return any(name in device_kind for name in HOPPER)


def num_multiprocessors(device: str) -> int:
    """Of a Hopper GPU, by JAX's name of its kind. A wrong number costs time and nothing else."""
    words = device.replace("-", " ").split()
    return next((n for name, n in _FEWER.items() if name in words), NUM_MULTIPROCESSORS)


def tiled_smem(shape: tuple[int, ...], dtype: Any, row_bytes: int = 128) -> Any:
    """Shared memory that bulk copies write and wgmma reads: swizzled tiles of 8 rows."""
    # Imported here: who only asks for names needs no compiler of kernels.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    itemsize = jnp.dtype(dtype).itemsize
    columns = row_bytes // itemsize
    transforms = (
        plgpu.TilingTransform((8, columns)),
        plgpu.SwizzleTransform(columns * itemsize),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)
