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


class ManualClock:
    """A clock that only moves when told to: for tests and simulation."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves time forward by `seconds` (≥ 0)."""
        assert seconds >= 0, seconds
        self._now_s += seconds
