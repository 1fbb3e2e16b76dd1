"""The highest rate at which enough requests are on time, found with few runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Attain = Callable[[float, int], float]
"""Attainment at a rate, by seed."""

FEWEST_MISSED = 1e-3
"""Share of missed requests that none is taken for, so that it has a logarithm."""

WIDEST = math.log(2.1)
"""Logarithm of how far apart two rates may be for a rate between them to be read off."""

_T_975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's t with 0 (never), 1, 2, … degrees of freedom."""


def highest_rate(
    attain: Callable[[float], float],
    threshold: float,
    *,
    low: float,
    high: float,
    attained_low: float | None = None,
    tolerance: float = 0.02,
) -> float:
    """The highest rate whose attainment is at least `threshold`.

    The share of missed requests grows about like a power of the rate. So the next rate is where a
    straight line between two rates' missed shares, in logarithms, crosses the threshold's (the
    middle, if the last one did not halve what was left). Once that crossing is within `tolerance`
    of a rate that was run, between two at most 2.1 times apart, it is the result. Attainment is
    taken to fall with the rate, which holds but for noise.

    Args:
        attain: attainment at a rate; called once a rate.
        threshold: 0 to 1, exclusive.
        low, high: rates to search between; `low` is returned if even there too few are on time. It
            is not run unless a rate above it fails.
        attained_low: attainment at `low`, if that is known.
        tolerance: relative distance of the result from a rate that was run.

    Source: regula falsi with bisection as its safeguard, e.g. Brent 1973, chapter 4.
    """
    if attained_low is not None and attained_low < threshold:
        return low
    attained = attain(high)
    if attained >= threshold:
        return high
    goal = _missed(threshold)
    low_is_run, is_slow = attained_low is not None, False
    missed_low = _missed(1.0 if attained_low is None else attained_low)
    missed_high = _missed(attained)
    while True:
        width = math.log(high / low)
        share = (goal - missed_low) / (missed_high - missed_low)
        nearest = width * min(share, 1.0 - share)
        if width <= tolerance or (
            low_is_run and width <= WIDEST and nearest <= math.log1p(tolerance)
        ):
            return low * math.exp(width * share) if low_is_run else low
        middle = low * math.exp(width * (0.5 if is_slow else min(max(share, 0.1), 0.9)))
        attained = attain(middle)
        if attained >= threshold:
            low, missed_low, low_is_run = middle, _missed(attained), True
        else:
            high, missed_high = middle, _missed(attained)
            if not low_is_run:
                attained = attain(low)
                if attained < threshold:
                    return low
                missed_low, low_is_run = _missed(attained), True
        is_slow = math.log(high / low) > 0.5 * width


def _missed(attained: float) -> float:
    """Logarithm of the share of requests that were not on time."""
    return math.log(max(1.0 - attained, FEWEST_MISSED))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with half the width of its 95% confidence interval."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From independent values, ≥ 1. One value alone has no interval: infinite."""
        n = len(values)
        mean = sum(values) / n
        if n == 1:
            return cls(mean, math.inf)
        variance = sum((value - mean) ** 2 for value in values) / (n - 1)
        t = _T_975[n - 1] if n <= len(_T_975) else 1.96 + 2.4 / (n - 1)
        return cls(mean, t * math.sqrt(variance / n))

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, where infinity is null."""
        half = self.half_width if math.isfinite(self.half_width) else None
        return {"mean": self.mean, "ci95": half}

    def __str__(self) -> str:
        half = f" ± {self.half_width:.2f}" if math.isfinite(self.half_width) else ""
        return f"{self.mean:.2f}{half}"


class Attainments:
    """Attainment by rate and seed, each run once.

    Args:
        attain: runs it.
    """

    def __init__(self, attain: Attain) -> None:
        self._attain = attain
        self._known: dict[tuple[float, int], float] = {}

    def at(self, rate: float, seed: int) -> float:
        """Attainment at a rate, by seed."""
        key = (round(rate, 6), seed)
        if key not in self._known:
            self._known[key] = self._attain(*key)
        return self._known[key]

    def learn(self, rate: float, seed: int, attainment: float) -> None:
        """Takes in what was found otherwise."""
        self._known[round(rate, 6), seed] = attainment

    def goodput(
        self,
        threshold: float,
        seeds: Sequence[int],
        *,
        low: float,
        high: float,
        tolerance: float = 0.02,
    ) -> Estimate:
        """The highest rate with this attainment: one search a seed.

        It begins between the nearest of the rates that are known already.
        """
        return Estimate.of([self._of_seed(threshold, seed, low, high, tolerance) for seed in seeds])

    def _of_seed(
        self, threshold: float, seed: int, low: float, high: float, tolerance: float
    ) -> float:
        known = sorted(rate for rate, of_seed in self._known if of_seed == seed)
        missed = [rate for rate in known if self.at(rate, seed) < threshold]
        upper = min([high, *missed])
        lower = max([low, *(rate for rate in known if rate < upper)])
        return highest_rate(
            functools.partial(self.at, seed=seed), threshold,
            low=lower, high=upper, attained_low=self._known.get((lower, seed)),
            tolerance=tolerance,
        )  # fmt: skip
