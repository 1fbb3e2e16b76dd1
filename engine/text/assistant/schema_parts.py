"""What schemas say, as the grammars of values that are not JSON need it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.engine.text.assistant.json_text import dumps
from octavo.engine.text.assistant.values import resolved, types_of

_WHOLE = "arguments"
"""What a part of a schema that stands alone calls the schema that it is of."""
_CLASSES = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": r"[ \t\n\r\f\v]"}
"""What classes mean in JSON schemas' patterns; a terminal's would hold all of Unicode."""
_DATE = (
    "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = (
    "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_HOST = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": "P([0-9]+W|[0-9]+D(T[0-9]+[HMS])?|[0-9]+[YM]|T[0-9]+[HMS])",
    "email": f"[a-zA-Z0-9_+-]+(\\.[a-zA-Z0-9_+-]+)*@{_HOST}(\\.{_HOST})*",
    "hostname": f"{_HOST}(\\.{_HOST}){{0,3}}",
    "ipv4": f"{_BYTE}(\\.{_BYTE}){{3}}",
    "ipv6": "([0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}|::1?",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": '[a-zA-Z][a-zA-Z0-9+.-]*:[^\\s<>"{}|\\\\^`]+',
}
"""Strings of the formats that `llguidance` knows: not all of each, and none but these."""
_OTHERS = {
    "boolean": "true|false",
    "null": "null",
    "integer": "-?(0|[1-9][0-9]*)",
    "number": "-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][+-]?[0-9]+)?",
}
"""Values that are no strings and have no parts, as JSON writes them."""


def object_schemas(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The objects of which a schema is one, each with all that it says of them.

    Properties that it demands are among those that it names.

    Args:
        schema: of an object.
        root: in which its references are looked up.
    """
    top = dict(resolved(schema, root))
    for part in top.pop("allOf", []):
        top = _merged(top, resolved(part, root))
    key = next((key for key in ("anyOf", "oneOf") if isinstance(top.get(key), list)), None)
    parts = [{}] if key is None else top.pop(key) or [{}]
    return [_with_demanded(_merged(top, resolved(part, root))) for part in parts]


def _with_demanded(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    named, more = schema.get("properties") or {}, schema.get("additionalProperties", True)
    demanded = [key for key in schema.get("required") or () if key not in named]
    if not demanded or more is False:
        return schema
    others = dict.fromkeys(demanded, more if isinstance(more, Mapping) else {})
    return {**schema, "properties": {**named, **others}}


def with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a schema that stands alone: with the whole beside it, if it refers to that."""
    moved = _moved(schema)
    return schema if moved == schema else {**moved, "$defs": {_WHOLE: _moved(root)}}


def _moved(schema: Any) -> Any:
    """The schema with references into the whole's place among the definitions."""
    if isinstance(schema, list):
        return [_moved(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _moved(value) for key, value in schema.items()}
    if isinstance(made.get("$ref"), str) and made["$ref"].startswith("#"):
        made["$ref"] = f"#/$defs/{_WHOLE}{made['$ref'][1:]}"
    return made


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
    if schema.get("type") == "null":
        return [None]
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
    named = _FORMATS.get(str(schema.get("format")))
    if named is not None:
        parts.append(f"/({_in_slashes(named)})/")
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.{{{least},{most}}})/")
    return f"({' & '.join(parts)})" if parts else ""


def strings_alone(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema's values that are strings."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [resolved(each, root) for each in schema[key]]
            strings = [
                {**part, "type": "string"} for part in parts if "string" in types_of(part, root)
            ]
            return {**schema, key: strings}
    return {**schema, "type": "string"}


def union_pattern(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """A terminal of the bare texts that match a schema of strings and other values without parts;
    "" if any does."""
    key = next((key for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
    rest = {name: value for name, value in schema.items() if name != key}
    branches = [schema] if key is None else [{**rest, **resolved(b, root)} for b in schema[key]]
    parts = []
    for branch in branches:
        types = types_of(branch, root)
        named = literals(branch, root)
        if named is not None:
            texts = [each if isinstance(each, str) else dumps(each) for each in named]
            parts += [dumps(text) for text in texts if text]
        elif "string" in types:
            text = pattern_of(branch)
            if not text:
                return ""
            # A text in quotes is read as JSON: another string than the pattern has seen.
            parts.append(
                text if types == {"string"} == types_of(schema, root) else f'({text} & ~/"(?s:.*)/)'
            )
        if named is None:
            parts += [f"/{_OTHERS[kind]}/" for kind in sorted(types - {"string"})]
    return f"({' | '.join(parts)})"


def _in_slashes(pattern: str) -> str:
    """A pattern as a terminal has it between slashes."""
    return re.sub(r"\\.|/", lambda found: _as_terminal(found[0]), pattern, flags=re.DOTALL)


def _as_terminal(part: str) -> str:
    if part == "/":
        return "\\/"
    if part[1] in "DWS":
        return f"[^{_CLASSES[part[1].lower()]}]"
    return _CLASSES.get(part[1], part)
