"""Keeps the C allocator from handing a step's temporaries back to the kernel after every step.

XLA's CPU client allocates a program's temporary buffer anew for each run. glibc serves blocks above
32 MB (and at first above 128 KB) by mapping fresh pages and unmaps them when freed, so every step
would fault in, and the kernel zero, tens of megabytes (docs/log.md has what that cost). XLA's own
threads would get arenas of their own, which never hold a block that large: one arena serves all.
"""

from __future__ import annotations

import ctypes
import logging
import platform

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Makes glibc reuse freed blocks of up to 1 GB. Process-wide; best before XLA starts threads.

    Returns:
        Whether it took effect; False without glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    options = (
        (_M_MMAP_THRESHOLD, _KEEP_BYTES),
        (_M_TRIM_THRESHOLD, _KEEP_BYTES),
        (_M_ARENA_MAX, 1),
    )
    done = [mallopt(option, value) for option, value in options]
    return all(done)
