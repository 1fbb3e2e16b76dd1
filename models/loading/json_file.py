"""JSON files that hold one object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.engine.errors import ModelLoadError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        ModelLoadError: it cannot be read, or holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} is not allowed: one JSON object")
    return values
