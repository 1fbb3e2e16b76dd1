"""What schemas say, as the grammars of values that are not JSON need it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.engine.text.assistant.values import resolved

_DEFINITIONS = ("$defs", "definitions")


def object_schemas(root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The objects of which a schema of arguments is one, each with all that it says of them."""
    top = dict(resolved(root, root))
    for part in top.pop("allOf", []):
        top = _merged(top, resolved(part, root))
    for key in ("anyOf", "oneOf"):
        if isinstance(top.get(key), list) and top[key]:
            parts = top.pop(key)
            return [_merged(top, resolved(part, root)) for part in parts]
    return [top]


def with_definitions(schema: Any, root: Mapping[str, Any]) -> Any:
    """A part of a schema that stands alone: with what its references point at."""
    if not isinstance(schema, Mapping):
        return schema
    found = {key: root[key] for key in _DEFINITIONS if key in root}
    return {**found, **schema}


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    properties = {**(first.get("properties") or {}), **(second.get("properties") or {})}
    required = [*(first.get("required") or ()), *(second.get("required") or ())]
    made = {**first, **second}
    if properties:
        made["properties"] = properties
    if required:
        made["required"] = required
    return made


def literals(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Any] | None:
    """The values of which a schema's is one, if it names them."""
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [literals(resolved(each, root), root) for each in schema[key]]
            if all(part is not None for part in parts):
                return [value for part in parts for value in part or ()]
    return None


def pattern_of(schema: Mapping[str, Any]) -> str:
    """A terminal of the texts that match a string's schema; "" if any does."""
    parts = []
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        first = "" if pattern.startswith("^") else "(?s:.*)"
        last = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^")
        inner = inner if last else inner[:-1]
        parts.append(f"/{first}(?:{_in_slashes(inner)}){last}/")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.{{{least},{most}}})/")
    return f"({' & '.join(parts)})" if parts else ""


def _in_slashes(pattern: str) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern)
