"""How long an engine's thread keeps its device waiting, and what keeps the thread.

For each turn between two waits for the device: wall time, the thread's own CPU time, and how long
the thread was runnable without a core (Linux' schedstat). What is left of the wall time it was
blocked: in a loop that does nothing but Python, on the interpreter lock. Reading all three costs
about three microseconds a step, wherever they are read: the interpreter lock is not given up for
it, as it would be by `os.pread`, to be waited for again.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from typing import Any

import numpy as np

_BUFFER = ctypes.create_string_buffer(64)
_pread = ctypes.PyDLL(None).pread
_pread.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_longlong)
_pread.restype = ctypes.c_ssize_t


class StepWaits:
    """Figures of one engine's thread, written by that thread alone."""

    def __init__(self) -> None:
        self._schedstat: int | None = None
        self._thread = 0
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self._left: tuple[float, float, float] | None = None
        self.gaps_s: list[float] = []
        """For each step dispatched behind another: how long the device had had nothing to do."""
        self.busy_s = 0.0
        """Seconds that these steps take."""
        self.late_s: list[tuple[float, float]] = []
        """How late the thread ran again after each wait for the device, and for how long of the
        wait it was runnable."""
        self._entered_s = 0.0
        self.turns: list[tuple[float, float, float]] = []
        """Wall, CPU and runnable seconds of each turn."""

    def dispatched(self, gap_s: float, busy_s: float) -> None:
        """A step was handed to a device whose earlier step ended (was to end, if below 0) so long
        ago."""
        self.gaps_s.append(max(gap_s, 0.0))
        self.busy_s += busy_s

    def began(self) -> None:
        """There had been nothing to do: the turn that ends is none."""
        self._left = None

    def enter(self) -> None:
        """The thread begins to wait for the device."""
        now = self._read()
        self._entered_s = now[2]
        if self._left is not None:
            before = self._left
            self.turns.append((now[0] - before[0], now[1] - before[1], now[2] - before[2]))

    def leave(self, end_s: float | None) -> None:
        """The thread goes on; `end_s` is when the device had been ready, if it waited at all."""
        now = self._read()
        if end_s is not None:
            self.late_s.append((max(now[0] - end_s, 0.0), now[2] - self._entered_s))
        self._left = now

    def summary(self) -> dict[str, Any]:
        """Percentiles in milliseconds, and shares."""
        late = np.asarray(self.late_s).reshape(-1, 2)
        gaps, turns = np.asarray(self.gaps_s), np.asarray(self.turns).reshape(-1, 3)
        blocked = np.maximum(turns[:, 0] - turns[:, 1] - turns[:, 2], 0.0)
        return {
            "steps": len(gaps),
            "device_idle_share": round(float(gaps.sum() / (gaps.sum() + self.busy_s)), 5),
            "late_steps_share": round(float((gaps > 0).mean()), 5),
            "device_waited_ms": percentiles(gaps),
            "thread_woke_late_ms": percentiles(late[:, 0]),
            "thread_woke_late_runnable_ms": percentiles(late[:, 1]),
            "turn_ms": percentiles(turns[:, 0]),
            "turn_cpu_ms": percentiles(turns[:, 1]),
            "turn_runnable_ms": percentiles(turns[:, 2]),
            "turn_blocked_ms": percentiles(blocked),
            "turn_waited_share": round(float(1 - turns[:, 1].sum() / turns[:, 0].sum()), 4),
        }

    def _read(self) -> tuple[float, float, float]:
        if self._thread != threading.get_native_id():
            self._thread = threading.get_native_id()
            self._schedstat = _open_schedstat(self._thread)
        runnable_s = 0.0
        if self._schedstat is not None:
            length = _pread(self._schedstat, _BUFFER, 64, 0)
            runnable_s = int(_BUFFER.raw[:length].split()[1]) / 1e9
        return time.perf_counter(), time.thread_time(), runnable_s


class CollectorPauses:
    """Python's own collector in this process: every thread that runs Python waits for it."""

    def __init__(self) -> None:
        self._begun_s = 0.0
        self.clear()
        gc.callbacks.append(self._told)

    def clear(self) -> None:
        """Begins anew."""
        self.pauses_s: list[float] = []

    def summary(self) -> dict[str, float]:
        """How many, how long together, and the longest."""
        return {
            "pauses": len(self.pauses_s),
            "sum_ms": round(sum(self.pauses_s) * 1e3, 3),
            "max_ms": round(max(self.pauses_s, default=0.0) * 1e3, 3),
        }

    def _told(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun_s = time.perf_counter()
        else:
            self.pauses_s.append(time.perf_counter() - self._begun_s)


def _open_schedstat(thread: int) -> int | None:
    try:
        return os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)
    except OSError:
        return None


def percentiles(seconds: Any) -> dict[str, float]:
    """p50, p99, mean and max, in milliseconds."""
    if not len(seconds):
        return {}
    milliseconds = np.asarray(seconds) * 1e3
    return {
        "p50": round(float(np.quantile(milliseconds, 0.5)), 3),
        "p99": round(float(np.quantile(milliseconds, 0.99)), 3),
        "mean": round(float(milliseconds.mean()), 3),
        "max": round(float(milliseconds.max()), 3),
    }
