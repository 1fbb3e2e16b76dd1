"""What a rotary position embedding is made of. No JAX; `models.layers` computes with it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import check_flag, check_number, check_positive, check_size, is_integer

RopeScalingKind = Literal["linear", "llama3", "factors", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How a model stretches its rotary frequencies beyond the context it was first trained on.

    Attributes:
        kind: "linear" divides every frequency by `factor`; "llama3" divides low frequencies by
            `factor` and blends in between, as "yarn" does otherwise; "factors" divides frequency i
            by `factors[i]`; "longrope" by `long_factors[i]` if more than the original context is
            served, and else by `factors[i]` (see `Rope.for_context`).
        factor: the divisor.
        low_freq_factor, high_freq_factor: ends of the blend, of "llama3".
        beta_fast, beta_slow: ends of the blend, of "yarn": turns over the original context.
        truncate: the ends are rounded outwards to whole frequencies, of "yarn".
        original_max_position: context before stretching, of "llama3", "yarn" and "longrope".
        factors, long_factors: one divisor a frequency (half as many as rotated dimensions), of
            "factors" and "longrope".
    """

    kind: RopeScalingKind
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

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
        check_positive("beta_fast", self.beta_fast)
        check_positive("beta_slow", self.beta_slow)
        check_flag("rope scaling truncate", self.truncate)
        for factor in (*self.factors, *self.long_factors):
            check_positive("rope scaling factors", factor)
        if self.kind in ("factors", "longrope") and not self.factors:
            raise ModelLoadError("rope scaling factors = () is not allowed: one a frequency")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ModelLoadError(
                f"low_freq_factor = {self.low_freq_factor} is not allowed: "
                f"below high_freq_factor ({self.high_freq_factor})"
            )
        if len(self.long_factors) != (len(self.factors) if self.kind == "longrope" else 0):
            raise ModelLoadError(
                f"long factors = {len(self.long_factors)} numbers is not allowed: as many as "
                f"short ones, of longrope alone"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Temperature:
    """Queries grow with their positions: by 1 + beta · log(1 + floor((position + first) / span)).

    Attributes:
        beta: how much.
        span: positions of one value.
        first: what the first position counts as.
    """

    beta: float
    span: int
    first: int = 0

    def __post_init__(self) -> None:
        check_positive("attention temperature beta", self.beta)
        check_size("attention temperature span", self.span)
        if not is_integer(self.first, 0, 1):
            raise ModelLoadError(
                f"attention temperature first = {shorten(self.first)} is not allowed: 0 or 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary position embedding of a layer.

    Attributes:
        theta: base of the frequencies.
        scaling: how they are stretched, if at all.
        fraction: of each head's dimensions, how many are rotated: the first ones on disk.
        amplitude: multiplies what is rotated.
        temperature: of queries, by their positions; None for the same at all of them.
        pairs: on disk, dimensions that are rotated together lie side by side. In memory they always
            lie half a head apart.
        long_amplitude: of "longrope", `amplitude` where more than the original context is served;
            None for the same.
        proportional: frequencies are the first ones of a head that is rotated whole, and what they
            rotate lies half a head apart on disk, too.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    fraction: float = 1.0
    amplitude: float = 1.0
    temperature: Temperature | None = None
    pairs: bool = False
    proportional: bool = False
    long_amplitude: float | None = None

    def __post_init__(self) -> None:
        check_positive("rope theta", self.theta)
        check_number("partial_rotary_factor", self.fraction, 0.0, 1.0, "a number from 0 to 1")
        check_positive("rope attention factor", self.amplitude)
        check_flag("rope pairs", self.pairs)
        check_flag("rope proportional", self.proportional)
        if self.long_amplitude is not None:
            check_positive("rope long attention factor", self.long_amplitude)
        if self.proportional and self.pairs:
            raise ModelLoadError("rope proportional = true is not allowed: false, with pairs")
        if self.scaling is not None and self.scaling.kind == "yarn" and self.theta <= 1.0:
            raise ModelLoadError(f"rope theta = {self.theta} is not allowed: above 1, for yarn")

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return int(head_dim * self.fraction)

    def for_context(self, num_tokens: int) -> Rope:
        """The same, where so many tokens are served at the most: of the two sets of factors that
        longrope has, the one that this context takes."""
        scaling = self.scaling
        if scaling is None or scaling.kind != "longrope":
            return self
        is_long = num_tokens > scaling.original_max_position
        factors = scaling.long_factors if is_long else scaling.factors
        long_amplitude = self.amplitude if self.long_amplitude is None else self.long_amplitude
        return dataclasses.replace(
            self,
            scaling=RopeScaling(kind="factors", factors=factors),
            amplitude=long_amplitude if is_long else self.amplitude,
            long_amplitude=None,
        )

    def check_head_dim(self, head_dim: int) -> None:
        """Refuse an odd number of rotated dimensions, and factors that are not one a frequency.

        Raises:
            ModelLoadError: naming how many there are.
        """
        rotary_dim = self.rotary_dim(head_dim)
        if rotary_dim % 2:
            raise ModelLoadError(
                f"partial_rotary_factor = {self.fraction} is not allowed: an even number of "
                f"dimensions of {head_dim}"
            )
        if self.scaling is None or self.scaling.kind not in ("factors", "longrope"):
            return
        if len(self.scaling.factors) != rotary_dim // 2:
            raise ModelLoadError(
                f"rope scaling factors = {len(self.scaling.factors)} numbers is not allowed: "
                f"{rotary_dim // 2}"
            )
