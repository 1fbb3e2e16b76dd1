"""What a request wants of the engine's time."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from octavo.engine.errors import InvalidRequestError

LONGEST_TARGET_S = 86_400
"""A day. What is promised beyond it is no promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Goals that a policy schedules by; None where there is none. Missing one loses no answer.

    Attributes:
        ttft_target_s: seconds from arrival to the first token.
        tpot_target_s: seconds a token after the first, in the mean.
        e2e_target_s: seconds from arrival to the last token.

    Raises:
        InvalidRequestError: a value that is not a finite number above 0, or beyond a day.
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
                or not (math.isfinite(value) and 0 < value <= LONGEST_TARGET_S)
            ):
                raise InvalidRequestError(
                    field.name,
                    value,
                    f"a finite number of seconds above 0, at most {LONGEST_TARGET_S} (a day), or "
                    "None",
                )


NO_TARGETS = Targets()
