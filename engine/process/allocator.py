"""Keeps the C allocator from handing a step's temporaries back to the kernel after every step.

XLA's CPU client allocates a program's temporary buffer anew for each run. glibc serves blocks above
32 MB (and at first above 128 KB) by mapping fresh pages and unmaps them when freed, so every step
would fault in, and the kernel zero, tens of megabytes (docs/findings/starts-and-memory.md has what
that cost). XLA's own threads would get arenas of their own, which never hold a block that large:
one arena serves all.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_KEEP_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Makes glibc reuse freed blocks of up to 1 GB, in the whole process and for good.

    It comes before XLA starts threads, that is before JAX looks for devices: the arenas that
    threads have by then stay.

    Returns:
        Whether it took effect; False without glibc.
    """
    mallopt = of_glibc("mallopt")
    if mallopt is None:
        return False
    options = (
        (_M_MMAP_THRESHOLD, _KEEP_BYTES),
        (_M_TRIM_THRESHOLD, _KEEP_BYTES),
        (_M_ARENA_MAX, 1),
    )
    done = [mallopt(option, value) for option, value in options]
    return all(done)


@functools.cache
def of_glibc(name: str) -> Any:
    """A function of the C library; None without glibc."""
    if platform.libc_ver()[0] != "glibc":
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
