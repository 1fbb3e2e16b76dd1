"""Quantiles of the last few values of something that changes."""

from __future__ import annotations

from collections import deque

_WINDOW = 16


class RecentValues:
    """The last 16 values: their median, and their tenth percentile. 0 before there is any.

    Attributes:
        middle: the median.
        low: the tenth percentile.
    """

    __slots__ = ("_values", "low", "middle")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self.middle = self.low = 0.0

    def observe(self, value: float) -> None:
        """Takes in a value; the oldest of 16 leaves."""
        self._values.append(value)
        ordered = sorted(self._values)
        self.middle = ordered[len(ordered) // 2]
        self.low = ordered[len(ordered) // 10]
