"""`octavo` with a thread that tells of its memory: see `server_memory.py`.

python -m benchmarks.server_memory_inside FILE serve ...
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax

from octavo.engine import engine as engine_module
from octavo.engine.execution.executor import DeviceExecutor
from octavo.server.cli.main import main

MB = 1e6
PERIOD_S = 1.0


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def tell(file: Path, executors: list[DeviceExecutor]) -> None:
    """Writes a line a period, for ever."""
    begun_s = time.monotonic()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _MallInfo
    while True:
        heap = libc.mallinfo2()
        line: dict[str, Any] = {
            "s": round(time.monotonic() - begun_s, 1),
            "heap_used_mb": round((heap.uordblks + heap.hblkhd) / MB, 1),
            "heap_kept_mb": round(heap.fordblks / MB, 1),
            "num_programs": 0,
        }
        for executor in executors:
            line |= _of(executor)
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        time.sleep(PERIOD_S)


def _of(executor: DeviceExecutor) -> dict[str, Any]:
    forms = getattr(executor.weights, "_forms", None)
    state = getattr(executor, "_state", None)
    whole = set() if forms is None else {id(leaf) for leaf in jax.tree.leaves(forms.whole)}
    pool = set() if state is None else {id(leaf) for leaf in jax.tree.leaves(state.kv)}
    sizes = {"weights_mb": 0, "pool_mb": 0, "other_arrays_mb": 0}
    for array in jax.live_arrays():
        try:
            where = "weights_mb" if id(array) in whole else "other_arrays_mb"
            sizes["pool_mb" if id(array) in pool else where] += array.nbytes
        except RuntimeError:  # donated meanwhile
            continue
    with contextlib.suppress(RuntimeError):
        leaves = [] if state is None else jax.tree.leaves(state.kv)
        sizes["pool_touched_mb"] = _resident(leaves)
    return {
        **{name: round(size / MB, 1) for name, size in sizes.items()},
        "num_programs": len(executor.programs.stats.seconds),
        "programs": sorted(executor.programs.stats.seconds),
        "num_compiled": len(executor.programs.stats.seconds)
        - len(executor.programs.stats.from_cache),
    }


def _resident(arrays: list[jax.Array]) -> int:
    """Bytes of CPU arrays that have memory behind them."""
    libc, page, count = ctypes.CDLL(None), mmap.PAGESIZE, 0
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    for array in arrays:
        first = array.unsafe_buffer_pointer() // page * page
        size = array.unsafe_buffer_pointer() + array.nbytes - first
        pages = ctypes.create_string_buffer(-(-size // page))
        if libc.mincore(first, size, pages) == 0:
            count += page * sum(each & 1 for each in pages.raw)
    return count


def run() -> int:
    """Runs the command that the arguments after the file are."""
    executors: list[DeviceExecutor] = []

    class Known(DeviceExecutor):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            executors.append(self)

    engine_module.DeviceExecutor = Known  # type: ignore[misc]
    threading.Thread(target=tell, args=(Path(sys.argv[1]), executors), daemon=True).start()
    return main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(run())
