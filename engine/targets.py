"""What a request wants of the engine's time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from octavo.engine.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Goals that a policy schedules by; None where there is none. Missing one loses no answer.

    Attributes:
        ttft_target_s: seconds from arrival to the first token.
        tpot_target_s: seconds a token after the first, in the mean.
        e2e_target_s: seconds from arrival to the last token.

    Raises:
        InvalidRequestError: a value that is not a finite number above 0.
    """

    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    e2e_target_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not (math.isfinite(value) and value > 0)
            ):
                raise InvalidRequestError(
                    field.name, value, "a finite number of seconds above 0, or None"
                )


NO_TARGETS = Targets()
