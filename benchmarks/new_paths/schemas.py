"""Schemas of calls that were drawn: closed, and each string of a length that ends."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("city", "days", "unit", "name", "size", "kind", "state", "limit", "from", "until", "note")
_VALUES = ("low", "high", "Oslo", "Rome", "müßig", 'a "b"', "c\\d", "</tool_call>", "π", "{}")


def draw_schemas(count: int, seed: int) -> list[dict[str, Any]]:
    """So many schemas of objects."""
    rng = random.Random(seed)
    return [_object(rng, depth=0) for _ in range(count)]


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": names if rng.random() < 0.7 else names[:1],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(5 if depth > 1 else 8)
    if kind == 0:
        return {"enum": rng.sample(_VALUES, rng.randint(1, 5))}
    if kind == 1:
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
    if kind == 2:
        return {"type": "boolean"}
    if kind == 3:
        return {"type": "string", "maxLength": rng.randint(0, 12)}
    if kind == 4:
        return {"type": "string", "pattern": rng.choice(("^[A-Z]{2}[0-9]{3}$", "^(on|off)$"))}
    if kind == 5:
        return _object(rng, depth + 1)
    if kind == 6:
        return {"type": "array", "items": _value(rng, depth + 1), "minItems": 1, "maxItems": 3}
    return {"anyOf": [_value(rng, depth + 1), {"type": "null"}]}
