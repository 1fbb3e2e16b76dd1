"""What the parameters of tools look like in tests."""

from __future__ import annotations

from typing import Any

SHORT = {"type": "string", "maxLength": 6}


def an_object(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The schema of an object with these properties and no others."""
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed, **more}


SCHEMAS = {
    "weather": an_object({"city": SHORT, "days": {"type": "integer", "minimum": 1, "maximum": 9}}),
    "listed": an_object({"ids": {"type": "array", "items": {"enum": ["ä", 'b"']}, "maxItems": 3}}),
    "nothing": an_object({}),
}
