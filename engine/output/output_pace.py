"""How often the readers of streams are woken: the busier the event loop is, the less often."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW_S = 0.02
"""Over which the event loop's share of a core is taken."""
BUSY_SHARE, CALM_SHARE = 0.35, 0.25
"""Above the first the interval grows, below the second it shrinks. The engine's thread needs the
same interpreter for about as much of each step."""
MOST_TIMES = 4.0
"""The interval grows to so many times the one that is asked for."""
GROWTH, DECAY = 1.5, 0.9


class OutputPace:
    """The least interval between two wakings of one reader. Lives in the event loop's thread.

    Args:
        least_s: seconds while the loop has time; 0 stays 0.
        cpu_s: CPU seconds of the loop's thread.
    """

    def __init__(self, least_s: float, cpu_s: Callable[[], float] = time.thread_time) -> None:
        self.least_s = least_s
        self.times = 1.0
        """How many times the least interval holds now."""
        self._cpu_s = cpu_s
        self._since: tuple[float, float] | None = None

    def interval_s(self, now_s: float) -> float:
        """The interval as of now, a moment of the loop's clock: call it often."""
        if not self.least_s:
            return 0.0
        if self._since is None:
            self._since = now_s, self._cpu_s()
        elif now_s - self._since[0] >= WINDOW_S:
            cpu_s = self._cpu_s()
            share = (cpu_s - self._since[1]) / (now_s - self._since[0])
            if share > BUSY_SHARE:
                self.times = min(self.times * GROWTH, MOST_TIMES)
            elif share < CALM_SHARE:
                self.times = max(self.times * DECAY, 1.0)
            self._since = now_s, cpu_s
        return self.least_s * self.times
