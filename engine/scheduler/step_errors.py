"""How far measured step times lie from predicted ones: a level, a low quantile and their age."""

from __future__ import annotations

import math
from collections import deque

_WINDOW = 16
_STREAK = 3
_LEVEL_RATE = 0.1
_NARROWEST, _WIDEST = 1.25, 2.0
_FORGET_BEST = 1.001
_GRACE_S, _GRACE_STEPS = 1.0, 2.0
_HALF_LIFE_S = 0.75
MOST_DOUBT = 16.0
"""Factor that the low quantile sinks by at the most, however long ago the last step was."""


class StepErrors:
    """Ratios of measured over regressed seconds, of the steps of one phase (decode or prefill).

    Three quantiles of the ratio are kept:

    - The *middle* one is `level`. It follows each ratio slowly, as a geometric mean does. Three
      ratios in a row outside of the band, all on one side, are a shift of the level, which moves
      to their median at once. A step that hung is one ratio outside of the band, and moves the
      level by no more than the band's edge does.
    - The *low* one is the tenth percentile of the last 16 ratios, and never above the level. It
      sinks with the second fast step, and rises only after all but one of 16 were slow.
    - The *high* one is the model's `safety`, which `StepTimeModel` keeps for both phases.

    Old measurements are worth less. Without a step for a second and what two more would take, the
    low quantile halves every 0.75 s, down to a sixteenth. The first ratio below the band that comes
    after such a pause is believed at once: a machine that was slow when it was last seen is
    measured again, and is known to be fast after one step.

    Attributes:
        level: the middle quantile.
    """

    __slots__ = ("_believed_s", "_best", "_low", "_streak", "_window", "level")

    def __init__(self) -> None:
        self.level = self._low = 1.0
        self._best = math.inf
        self._window: deque[float] = deque(maxlen=_WINDOW)
        self._streak: list[float] = []
        self._believed_s: float | None = None

    def observe(
        self, ratio: float, now_s: float, *, is_news: bool, safety: float, step_s: float = 0.0
    ) -> None:
        """Learns from a step.

        Args:
            ratio: its measured over its regressed seconds, without the level.
            now_s: engine clock.
            is_news: whether the regression knew what such a step takes, so that the ratio says
                something of the level.
            safety: the high quantile, which widens the band.
            step_s: what such a step is expected to take.
        """
        was_doubted = self.doubt(now_s) > 1.0
        self._believed_s = now_s + _GRACE_S + _GRACE_STEPS * step_s
        self._window.append(ratio)
        if is_news:
            self._follow(ratio, was_doubted, safety)
        ordered = sorted(self._window)
        self._low = ordered[len(ordered) // 10]
        self._best = min(self._best * _FORGET_BEST, self._low)

    def _follow(self, ratio: float, was_doubted: bool, safety: float) -> None:
        above = ratio / self.level
        upper = min(max(safety, _NARROWEST), _WIDEST)
        lower = 1.0 / upper
        if lower <= above <= upper:
            self._streak.clear()
        else:
            if self._streak and (self._streak[-1] > self.level) != (above > 1.0):
                self._streak.clear()
            self._streak.append(ratio)
        if len(self._streak) == _STREAK or (was_doubted and above < lower):
            self.level = sorted(self._streak)[len(self._streak) // 2]
            self._streak.clear()
        else:
            self.level *= min(max(above, lower), upper) ** _LEVEL_RATE

    def doubt(self, now_s: float) -> float:
        """Factor, 1 to `MOST_DOUBT`, by which the low quantile has sunk since the last step."""
        if self._believed_s is None:
            return 1.0
        age_s = now_s - self._believed_s
        if age_s <= 0.0:
            return 1.0
        return float(min(2.0 ** min(age_s / _HALF_LIFE_S, 64.0), MOST_DOUBT))

    def low(self, now_s: float) -> float:
        """The low quantile as of now, over the level: at most 1."""
        return min(self._low / self.level, 1.0) / self.doubt(now_s)

    def doubted_s(self, factor: float) -> float:
        """When `doubt` comes to a factor, if no step is measured before; infinity if never."""
        if self._believed_s is None or factor > MOST_DOUBT:
            return math.inf
        return self._believed_s + _HALF_LIFE_S * math.log2(max(factor, 1.0))

    @property
    def best(self) -> float:
        """The least low quantile of the last thousand steps or so, over the level: at most 1."""
        return min(self._best / self.level, 1.0)
