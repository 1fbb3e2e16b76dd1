"""What a step costs, learned from the steps that ran.

A plain mean of seconds a token is far off for mixed steps: weights are read once a step, decode
rows pay for their context, prompt tokens for arithmetic. A linear model of a few sums is close,
and small enough to refit with every step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

import numpy as np

_SCALES = (1.0, 64.0, 512.0, 65536.0, 1e6)
"""Typical sizes of the features, so that one regularisation suits all of them."""

_ROW_S, _DEAR_ROW_S = 2e-5, 1e-3
_FORGETTING = 0.999
_QUANTILE_RATE = 0.02
_MAX_KNOWN_RATIO, _MAX_RATIO = 2.0, 4.0
_NUM_UNBOUNDED = 16
_NOISE = 0.05
_LEAST_S = 1e-6
_FLOOR_SHARE = 0.25


class StepFeatures(NamedTuple):
    """What a step's time depends on; of a mean step, means.

    Attributes:
        num_decode: decode rows, D.
        num_prefill: prompt tokens, P.
        decode_context: sum of the decode rows' contexts, in tokens.
        prefill_context: sum over chunks of tokens times the context before them.
    """

    num_decode: float
    num_prefill: float
    decode_context: float = 0.0
    prefill_context: float = 0.0


NO_FEATURES = StepFeatures(0, 0)
"""Of a step without rows."""


class StepTimeModel:
    """Recursive least squares on `[1, D, P, Σ context, Σ P · context]`, an intercept a bucket.

    The regression gives the shape of a step's time. Its level is a factor of each phase (steps of
    decode rows alone; steps with prompt tokens), which takes in an abrupt change (a hotter device,
    a busier host) within three steps. The regression learns from measured seconds over the level,
    so that it keeps its shape while the level moves.

    Errors are known as three running quantiles of measured over predicted time:

    - low, `least_share`: the tenth percentile of the phase's last 16 steps, lower the longer ago
      the last one was. A request is refused only if it would be late at this quantile.
    - middle: the level, in every prediction.
    - high, `safety`: the 95th percentile, by which a promise to a row is rounded up.

    See `StepErrors` for how the first two move.

    No step is expected to take less than a quarter of the fastest one measured: a few steps that
    were held up can bend the regression of a phase down to nothing.

    Args:
        token_edges: edges of the compiled token buckets, ascending: padding makes each a step of
            its own fixed cost.
        fixed_s, decode_row_s, prefill_token_s: prior belief, seconds a step, a decode row and a
            prompt token.

    Attributes:
        num_observed: steps learned from.
        error_sum: of the predictions' errors, each over the larger of measured and predicted.
        safety: the 95th percentile factor, ≥ 1.
        decode, prefill: errors of the steps of each phase.

    Source: Kulhavý, "Restricted exponential forgetting in real-time identification", 1987.
    """

    def __init__(
        self,
        token_edges: tuple[int, ...],
        *,
        fixed_s: float = 0.01,
        decode_row_s: float = _ROW_S,
        prefill_token_s: float = 5e-5,
    ) -> None:
        self._edges = list(token_edges[:-1])
        num_weights = len(_SCALES) + len(self._edges)
        self._weights = np.zeros(num_weights)
        prior = (fixed_s, decode_row_s, prefill_token_s)
        self._weights[:3] = [value * scale for value, scale in zip(prior, _SCALES, strict=False)]
        # What the prior may be wrong by: its slopes and fixed cost by a factor of several, a
        # bucket's own offset by a part of the fixed cost.
        doubt = np.full(num_weights, 0.5 * fixed_s)
        doubt[:3] = 4.0 * self._weights[:3]
        doubt[3:5] = 4.0 * self._weights[1:3]
        self._covariance = np.diag((doubt / _NOISE) ** 2)
        self._x = np.zeros(num_weights)
        self.decode = StepErrors()
        self.prefill = StepErrors()
        self._safety = 1.1
        self._floor_s = _LEAST_S
        self.num_observed = 0
        self.error_sum = 0.0
        self._publish()

    @classmethod
    def of(cls, token_edges: tuple[int, ...], *, has_dear_rows: bool) -> StepTimeModel:
        """A model of steps of which none ran yet; see `StepLimits` for the arguments.

        What rows cost can be doubted only as far as the prior allows: too little of it on a CPU,
        and steps of more rows than any before are priced as if they were free for minutes; too
        much of it elsewhere, and a few noisy steps of few rows price hundreds.
        """
        return cls(token_edges, decode_row_s=_DEAR_ROW_S if has_dear_rows else _ROW_S)

    def predict_s(self, features: StepFeatures) -> float:
        """Expected seconds of a step; of one iteration, if it decodes several."""
        num_decode, num_prefill, decode_context, prefill_context = features
        bucket = bisect_left(self._edges, num_decode + num_prefill)
        seconds = (
            self._intercepts[bucket]
            + self._decode_s * num_decode
            + self._prefill_s * num_prefill
            + self._decode_context_s * decode_context
            + self._prefill_context_s * prefill_context
        )
        level = (self.prefill if num_prefill else self.decode).level
        return max(seconds * level, self._floor_s)

    def predict_prefill_s(self, num_tokens: int) -> float:
        """Expected seconds of a step of prompt tokens alone, with nothing before them."""
        bucket = bisect_left(self._edges, num_tokens)
        seconds = self._intercepts[bucket] + self._prefill_s * num_tokens
        return max(seconds * self.prefill.level, self._floor_s)

    def least_share(self, now_s: float, *, is_prefill: bool) -> float:
        """The low quantile of measured over predicted time in a phase, at most 1."""
        return (self.prefill if is_prefill else self.decode).low(now_s)

    def decode_cost_s(self, num_decode: int, mean_context: float) -> tuple[float, float]:
        """Seconds that a step of so many decode rows costs whatever is in it, and those that each
        of its rows adds.

        Args:
            mean_context: positions that a row attends to.
        """
        fixed_s = self._intercepts[bisect_left(self._edges, num_decode)]
        row_s = self._decode_s + self._decode_context_s * mean_context
        level = self.decode.level
        return max(fixed_s, _LEAST_S) * level, row_s * level

    def prefill_token_s(self, mean_context: float) -> float:
        """Seconds that a prompt token adds to a step that runs anyway.

        Args:
            mean_context: positions before it.
        """
        return (self._prefill_s + self._prefill_context_s * mean_context) * self.prefill.level

    @property
    def safety(self) -> float:
        return self._safety

    def prefill_tokens_within(
        self, seconds: float, num_decode: int, decode_context: float, mean_context: float
    ) -> int:
        """Most prompt tokens beside the decode rows for which the step takes at most `seconds`.

        Args:
            mean_context: context before the prompt tokens.
        """
        if seconds < self._floor_s:
            return 0
        token_s = max(self._prefill_s + self._prefill_context_s * mean_context, 1e-9)
        base_s = self._decode_s * num_decode + self._decode_context_s * decode_context
        left_s = seconds / self.prefill.level - base_s
        high = 1 << 30
        for bucket in range(len(self._edges), -1, -1):
            low = self._edges[bucket - 1] if bucket else 0
            tokens = int(min((left_s - self._intercepts[bucket]) / token_s, high - num_decode))
            if tokens > max(0, low - num_decode):
                return tokens
            high = low
        return 0

    def predict_edges_s(
        self, first: int, num_decode: int, decode_context: float, mean_context: float
    ) -> list[float]:
        """Expected seconds of a step filled with prompt tokens to each edge but the last.

        Args:
            first: index of the edge to begin with, one of more than `num_decode` tokens.
            mean_context: context before the prompt tokens.
        """
        token_s = self._prefill_s + self._prefill_context_s * mean_context
        base_s = self._decode_s * num_decode + self._decode_context_s * decode_context
        floor_s, level = self._floor_s, self.prefill.level
        return [
            max((intercept + (base_s + token_s * (edge - num_decode))) * level, floor_s)
            for intercept, edge in zip(self._intercepts[first:], self._edges[first:], strict=False)
        ]

    def observe(self, features: StepFeatures, seconds: float, now_s: float) -> None:
        """Learns from one measured step (or iteration) of `seconds` > 0, known at `now_s`."""
        errors = self.prefill if features.num_prefill else self.decode
        predicted = self.predict_s(features)
        # Bounded, so that the first step, which nobody could know, does not outweigh thousands.
        self.error_sum += abs(seconds - predicted) / max(seconds, predicted)
        fastest_s = _FLOOR_SHARE * seconds
        self._floor_s = min(self._floor_s, fastest_s) if self.num_observed else fastest_s
        self.num_observed += 1
        bucket = bisect_left(self._edges, features.num_decode + features.num_prefill)
        # Weighting by 1 / time makes the error that is minimised a relative one.
        regressed = predicted / errors.level
        weight = 1.0 / max(regressed, 1e-6)
        x = self._x
        x.fill(0.0)
        x[: len(_SCALES)] = [
            value / scale * weight for value, scale in zip((1.0, *features), _SCALES, strict=True)
        ]
        if bucket:
            x[len(_SCALES) + bucket - 1] = weight
        px = self._covariance.dot(x)
        variance = float(x.dot(px))
        # Below the noise the regression knows such a step, and an error is one of the level; above
        # it an error is the regression's own.
        is_known = variance < 1.0
        taught_s = seconds
        if self.num_observed > _NUM_UNBOUNDED:
            # A step that hung says nothing about the next one's arithmetic.
            most = _MAX_KNOWN_RATIO if is_known else _MAX_RATIO
            taught_s = min(max(seconds, predicted / most), predicted * most)
        error = taught_s / errors.level * weight - float(self._weights.dot(x))
        self._weights += px * (error / (1.0 + variance))
        # Old steps are forgotten only in the direction of this one: what has not been seen for
        # long is not held for unknown.
        shrink = _FORGETTING - (1.0 - _FORGETTING) / max(variance, 1e-12)
        if shrink != 0.0:
            self._covariance -= np.multiply.outer(px, px / (1.0 / shrink + variance))
        self._publish()
        if not is_known:
            regressed = self.predict_s(features) / errors.level
        errors.observe(
            seconds / regressed,
            now_s,
            is_news=is_known,
            safety=self._safety,
            step_s=regressed * errors.level,
        )
        step = _QUANTILE_RATE * (0.95 if seconds > self._safety * predicted else -0.05)
        self._safety = min(max(self._safety + step, 1.0), 2.0)

    def _publish(self) -> None:
        """Keeps the weights as plain floats: predictions are made one at a time."""
        fixed, decode, prefill, decode_context, prefill_context, *offsets = self._weights.tolist()
        _, decode_scale, prefill_scale, decode_context_scale, prefill_context_scale = _SCALES
        self._decode_s = max(decode / decode_scale, 0.0)
        self._prefill_s = max(prefill / prefill_scale, 0.0)
        self._decode_context_s = max(decode_context / decode_context_scale, 0.0)
        self._prefill_context_s = max(prefill_context / prefill_context_scale, 0.0)
        self._intercepts = [fixed, *[fixed + offset for offset in offsets]]


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
