"""Keeps the C allocator from handing a step's temporaries back to the kernel after every step.

XLA's CPU client allocates a program's temporary buffer anew for each run. glibc serves blocks above
32 MB (and at first above 128 KB) by mapping fresh pages and unmaps them when freed, so every step
would fault in, and the kernel zero, tens of megabytes (docs/log.md has what that cost).
"""

from __future__ import annotations

import ctypes
import logging
import platform

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Raises glibc's thresholds so that freed blocks of up to 1 GB are reused. Process-wide.

    Returns:
        Whether it took effect; False without glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))
