"""Targets as clients write them: milliseconds, in headers or metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.targets import Targets

KINDS = ("ttft", "tpot", "e2e")


def read_targets(headers: Mapping[str, Any], fields: Mapping[str, float]) -> Targets:
    """Targets from a request's own fields, and from headers where a field is not given.

    Args:
        headers: by lower-case name; `x-slo-ttft-ms`, `x-slo-tpot-ms`, `x-slo-e2e-ms` are read.
        fields: "ttft_target_ms" and the like -> milliseconds, for those that were given.

    Raises:
        InvalidRequestError: a value that is not a finite number of milliseconds above 0.
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
        if not (math.isfinite(milliseconds) and milliseconds > 0):
            raise InvalidRequestError(name, value, "a finite number of milliseconds above 0")
        seconds[f"{kind}_target_s"] = milliseconds / 1e3
    return Targets(**seconds)
