"""NumPy arrays that JAX can take over on the CPU without copying them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 64
"""What XLA's CPU backend asks of a buffer that it is to use in place."""


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An uninitialized array that starts at a multiple of `ALIGNMENT_BYTES`."""
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT_BYTES
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)
