"""How many replicas a fleet should have: by a signal, with time between two looks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from octavo.engine.errors import InvalidConfigError

SIGNALS = ("saturation", "refusals", "attainment")


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """A rule for the number of replicas.

    Attributes:
        signal: `saturation` (requests there over rows), `refusals` (share of the requests that were
            refused since the last look), or `attainment` (share that was routed where its own
            forecast is too late).
        least, most: replicas.
        high, low: of the signal: above `high` replicas are added, in proportion; below `low` one is
            taken away.
        every_s: between two looks.
        start_s: until a new replica serves.
        calm_looks: looks below `low` in a row before a replica is taken away.
    """

    signal: str = "saturation"
    least: int = 1
    most: int = 64
    high: float = 0.7
    low: float = 0.3
    every_s: float = 5.0
    start_s: float = 30.0
    calm_looks: int = 6

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS:
            raise InvalidConfigError("autoscale.signal", self.signal, ", ".join(SIGNALS))
        if not 1 <= self.least <= self.most:
            raise InvalidConfigError("autoscale.least", self.least, f"1 to most = {self.most}")
        if not 0 <= self.low < self.high:
            raise InvalidConfigError("autoscale.low", self.low, f"0 to below high = {self.high:g}")
        for name in ("every_s", "start_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidConfigError(f"autoscale.{name}", getattr(self, name), "above 0")

    @classmethod
    def parse(cls, text: str) -> Autoscaling:
        """Reads `"saturation:least=2,most=16,high=0.8"`.

        Raises:
            InvalidConfigError: an unknown name, or a value out of range.
        """
        signal, _, rest = text.partition(":")
        kinds = {spec.name: spec.type for spec in fields(cls) if spec.name != "signal"}
        values: dict[str, float] = {}
        for part in filter(None, rest.split(",")):
            name, _, value = part.partition("=")
            if name not in kinds:
                raise InvalidConfigError("autoscale", name, f"one of {', '.join(kinds)}")
            try:
                values[name] = int(value) if kinds[name] == "int" else float(value)
            except ValueError:
                raise InvalidConfigError(f"autoscale.{name}", value, f"{kinds[name]}") from None
        return cls(signal=signal, **values)  # type: ignore[arg-type]


class Autoscaler:
    """Applies a rule, look by look."""

    def __init__(self, rule: Autoscaling) -> None:
        self._rule = rule
        self._num_calm = 0

    def wanted(self, signal: float, num_serving: int, num_coming: int) -> int:
        """The number of replicas that there should be.

        Args:
            signal: as the rule's signal says.
            num_serving: replicas that take requests.
            num_coming: those that are being started: they count as serving, so that one overload is
                not answered at every look.
        """
        rule, num = self._rule, num_serving + num_coming
        if signal > rule.high:
            self._num_calm = 0
            if num_coming:
                return num
            ratio = signal / rule.high if rule.signal == "saturation" else 1.0 + signal
            return min(rule.most, max(num + 1, math.ceil(num * ratio)))
        self._num_calm = self._num_calm + 1 if signal < rule.low else 0
        if self._num_calm >= rule.calm_looks and not num_coming:
            self._num_calm = 0
            return max(rule.least, num - 1)
        return max(rule.least, num)
