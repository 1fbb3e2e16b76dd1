"""Targets as clients write them: milliseconds, in headers or metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.targets import LONGEST_TARGET_S, Targets

KINDS = ("ttft", "tpot", "e2e")


def read_targets(headers: Mapping[str, Any], fields: Mapping[str, float]) -> Targets:
    """Targets from a request's own fields, and from headers where a field is not given.

    Args:
        headers: by lower-case name; `x-slo-ttft-ms`, `x-slo-tpot-ms`, `x-slo-e2e-ms` are read.
        fields: "ttft_target_ms" and the like -> milliseconds, for those that were given.

    Raises:
        InvalidRequestError: a value that is not a finite number of milliseconds above 0, or beyond
            a day.
    """
    seconds: dict[str, float] = {}
    for kind in KINDS:
        name = f"{kind}_target_ms"
        value: Any = fields.get(name)
        if value is None:
            name = f"x-slo-{kind}-ms"
            value = headers.get(name)
        if value is None:
            continue
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = math.nan
        if not 0 < milliseconds <= 1e3 * LONGEST_TARGET_S:  # nor NaN
            most = f"{1000 * LONGEST_TARGET_S} (a day)"
            raise InvalidRequestError(
                name, value, f"a finite number of milliseconds above 0, at most {most}"
            )
        seconds[f"{kind}_target_s"] = milliseconds / 1e3
    return Targets(**seconds)
