"""Time, injected: the scheduler never asks the machine for it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the engine takes time from; seconds from an arbitrary start, never going back."""

    def now_s(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()
