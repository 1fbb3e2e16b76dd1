"""Gives memory that nothing needs back to the kernel: what compiling took, and pools of zeros.

What compiling a program took, up to a gigabyte, no step will want.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

from octavo.engine.process.allocator import of_glibc


def give_back_after_compiling() -> None:
    """Gives back what compiling or loading a program took and left."""
    give_back_freed_memory()
    give_back_idle_code()


def give_back_freed_memory() -> None:
    """Gives all whole pages of freed blocks back to the kernel; the next step faults its own in."""
    malloc_trim = of_glibc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def give_back_idle_code() -> None:
    """Takes libraries' code out of this process until it is run again: compiling runs 0.1 GB of the
    compiler's, which no step does. What is run again is found in the kernel's cache of files."""
    madvise = of_glibc("madvise")
    if madvise is None:
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for first, end in _whole_code():
        madvise(first, end - first, mmap.MADV_DONTNEED)


def _whole_code() -> Iterator[tuple[int, int]]:
    """Where files are mapped as code that nobody has written to: only that can be read anew."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return
    place = None
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):
            is_code = words[1] == "r-xp" and len(words) > 5 and words[5].startswith("/")
            first, _, end = words[0].partition("-")
            place = (int(first, 16), int(end, 16)) if is_code else None
        elif words[0] == "Anonymous:" and place is not None and words[1] == "0":
            yield place


def give_back_zeros(arrays: Iterable[jax.Array]) -> None:
    """Gives memory of CPU arrays that are all zeros back to the kernel, which makes zeros again of
    each page that is read or written: a pool takes memory as it is used.

    Args:
        arrays: zeros, on CPUs; nobody may be at them meanwhile.
    """
    madvise = of_glibc("madvise")
    if madvise is None:
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    page = mmap.PAGESIZE
    for array in arrays:
        for shard in array.addressable_shards:
            at = shard.data.unsafe_buffer_pointer()
            first, end = -(-at // page) * page, (at + shard.data.nbytes) // page * page
            if end > first:
                madvise(first, end - first, mmap.MADV_DONTNEED)
