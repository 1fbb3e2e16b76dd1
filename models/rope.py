"""What a rotary position embedding is made of. No JAX; `models.layers` computes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import check_positive, check_size

RopeScalingKind = Literal["linear", "llama3", "factors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How a model stretches its rotary frequencies beyond the context it was first trained on.

    Attributes:
        kind: "linear" divides every frequency by `factor`; "llama3" divides low frequencies by
            `factor` and blends in between; "factors" divides frequency i by `factors[i]`.
        factor: the divisor.
        low_freq_factor, high_freq_factor: ends of the blend, of "llama3".
        original_max_position: context before stretching, of "llama3".
        factors: one divisor a frequency (head_dim / 2 of them), of "factors".
    """

    kind: RopeScalingKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeScalingKind):
            raise UnsupportedModelError(
                f"rope scaling = {shorten(self.kind)} is not supported: "
                f"{', '.join(get_args(RopeScalingKind))}"
            )
        check_positive("rope scaling factor", self.factor)
        check_positive("low_freq_factor", self.low_freq_factor)
        check_positive("high_freq_factor", self.high_freq_factor)
        check_size("original_max_position", self.original_max_position)
        for factor in self.factors:
            check_positive("rope scaling factors", factor)
        if self.kind == "factors" and not self.factors:
            raise ModelLoadError("rope scaling factors = () is not allowed: one a frequency")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ModelLoadError(
                f"low_freq_factor = {self.low_freq_factor} is not allowed: "
                f"below high_freq_factor ({self.high_freq_factor})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding of a layer.

    Attributes:
        theta: base of the frequencies.
        scaling: how they are stretched, if at all.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_positive("rope theta", self.theta)

    def check_head_dim(self, head_dim: int) -> None:
        """Refuse factors that are not one a frequency of heads of `head_dim`.

        Raises:
            ModelLoadError: naming how many there are.
        """
        if self.scaling is None or self.scaling.kind != "factors":
            return
        if len(self.scaling.factors) != head_dim // 2:
            raise ModelLoadError(
                f"rope scaling factors = {len(self.scaling.factors)} numbers is not allowed: "
                f"{head_dim // 2}"
            )
