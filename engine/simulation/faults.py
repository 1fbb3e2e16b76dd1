"""What goes wrong in a simulation, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

from octavo.engine.errors import InvalidConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often things go wrong; the default is never.

    Attributes:
        slow_step_share: steps that take `slow_step_factor` times as long.
        slow_step_factor: ≥ 1.
        step_noise: standard deviation of the logarithm of every step's duration.
        failed_step_share: steps whose result is an error; the device's state is lost with it.
        hung_step_share: steps that never end: they are given up after `hung_step_s`, and the
            device's state is lost with them.
        hung_step_s: seconds until a hung step is given up.
        failed_transfer_share: page copies that end without their pages.
        stuck_transfer_share: page copies that fail only after `stuck_transfer_s`.
        stuck_transfer_s: seconds until a stuck copy is given up.
        cancelled_share: requests whose client leaves before the end.
    """

    slow_step_share: float = 0.0
    slow_step_factor: float = 5.0
    step_noise: float = 0.0
    failed_step_share: float = 0.0
    hung_step_share: float = 0.0
    hung_step_s: float = 60.0
    failed_transfer_share: float = 0.0
    stuck_transfer_share: float = 0.0
    stuck_transfer_s: float = 5.0
    cancelled_share: float = 0.0

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name.endswith("_share") and not 0 <= value <= 1:
                raise InvalidConfigError(spec.name, value, "a share from 0 to 1")
            if value < 0:
                raise InvalidConfigError(spec.name, value, "a number of at least 0")
        if self.slow_step_factor < 1:
            raise InvalidConfigError("slow_step_factor", self.slow_step_factor, "at least 1")

    @classmethod
    def parse(cls, text: str) -> Faults:
        """Reads `"slow_step_share=0.01,failed_step_share=0.001"`.

        Raises:
            InvalidConfigError: an unknown name, or a value out of range.
        """
        return cls(**read_numbers("faults", text, [spec.name for spec in fields(cls)]))


def read_numbers(field: str, text: str, names: Sequence[str]) -> dict[str, float]:
    """Reads numbers by name, `"a=1,b=0.5"`.

    Args:
        field: what the text is called, for errors.
        names: that may be given.

    Raises:
        InvalidConfigError: an unknown name, or no number.
    """
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in names:
            raise InvalidConfigError(field, name, f"one of {', '.join(names)}")
        try:
            values[name] = float(value)
        except ValueError:
            raise InvalidConfigError(f"{field}.{name}", value, "a number") from None
    return values


NO_FAULTS = Faults()


class FaultSource:
    """Draws faults; each kind from a stream of its own, so that one does not move another.

    Args:
        faults: how often.
        seed: same seed, same faults.
    """

    def __init__(self, faults: Faults, seed: int) -> None:
        self._faults = faults
        self._steps = random.Random(f"steps {seed}")
        self._transfers = random.Random(f"transfers {seed}")
        self._has_slow = faults.slow_step_share > 0 or faults.step_noise > 0
        self._has_failed = faults.failed_step_share > 0
        self._has_hung = faults.hung_step_share > 0
        self._hangs = random.Random(f"hangs {seed}")

    def stretch(self) -> float:
        """What the next step's duration is multiplied by."""
        if not self._has_slow:
            return 1.0
        factor = self._steps.lognormvariate(0.0, self._faults.step_noise)
        if self._steps.random() < self._faults.slow_step_share:
            factor *= self._faults.slow_step_factor
        return factor

    def step_fails(self) -> bool:
        """Whether the next step fails."""
        return self._has_failed and self._steps.random() < self._faults.failed_step_share

    def hang_s(self) -> float:
        """Seconds after which the next step is given up; 0 if it ends."""
        if self._has_hung and self._hangs.random() < self._faults.hung_step_share:
            return self._faults.hung_step_s
        return 0.0

    def transfer(self) -> tuple[bool, float]:
        """Whether the next copy succeeds, and the seconds it is late."""
        draw = self._transfers.random()
        if draw < self._faults.stuck_transfer_share:
            return False, self._faults.stuck_transfer_s
        failing = self._faults.stuck_transfer_share + self._faults.failed_transfer_share
        return draw >= failing, 0.0
