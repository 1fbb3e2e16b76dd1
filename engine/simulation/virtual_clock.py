"""Time as a simulation has it."""

from __future__ import annotations


class VirtualClock:
    """A clock that moves only when something happens, and never back."""

    __slots__ = ("_now_s",)

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Moves on to `time_s`, if that is not past yet."""
        if time_s > self._now_s:
            self._now_s = time_s

    def advance(self, seconds: float) -> None:
        """Moves on by `seconds` (≥ 0)."""
        assert seconds >= 0, seconds
        self._now_s += seconds
