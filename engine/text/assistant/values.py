"""JSON values of arguments whose text does not say their type."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.engine.text.assistant.json_text import dumps

ALL = frozenset({"string", "integer", "number", "boolean", "null", "array", "object"})
_NICKNAMES = {
    "str": "string",
    "text": "string",
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
"""Types that JSON schema does not know and people write."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_MAX_REFERENCES = 16


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a chain of references within the root leads to; {} if it leads nowhere."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _at(root, reference)
    return {}


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types of values that a schema may match.

    Args:
        schema: of the value.
        root: in which its references are looked up.
        depth: of the schema in those that were asked before.
    """
    schema = resolved(schema, root)
    if depth > _MAX_REFERENCES:
        return ALL
    types = ALL
    if "type" in schema:
        given = schema["type"]
        names = [given] if isinstance(given, str) else given
        types = frozenset(_known(names)) or ALL
    if "const" in schema:
        types &= {_type(schema["const"])}
    if isinstance(schema.get("enum"), list):
        types &= frozenset(map(_type, schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            types &= _any(types_of(each, root, depth + 1) for each in schema[key])
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            types &= types_of(each, root, depth + 1)
    return types


def parameter_schema(schema: Mapping[str, Any], key: str) -> Any:
    """The schema of one of an object's properties; {} if nothing is said of it."""
    top = resolved(schema, schema)
    properties = top.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    for name in ("anyOf", "oneOf", "allOf"):
        for each in top.get(name) or () if isinstance(top.get(name), list) else ():
            inner = resolved(each, schema).get("properties")
            if isinstance(inner, Mapping) and key in inner:
                return inner[key]
    more = top.get("additionalProperties")
    return more if isinstance(more, Mapping) else {}


def json_of_text(text: str, types: frozenset[str]) -> str:
    """The JSON value that a bare text stands for: one of the types if it can be, else a string."""
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return dumps(text)
    kind = _type(value)
    if kind in types or (kind == "integer" and "number" in types):
        return bare
    if kind == "number" and "integer" in types and float(value).is_integer():
        return bare
    if kind == "string" and types == ALL:
        return bare
    return dumps(text)


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    if value is None:
        return "null"
    return "object" if isinstance(value, Mapping) else "array"


def _known(names: Any) -> Iterable[str]:
    for name in names if isinstance(names, list | tuple) else ():
        name = _NICKNAMES.get(name, name) if isinstance(name, str) else ""
        if name in ALL:
            yield name


def _any(types: Iterable[frozenset[str]]) -> frozenset[str]:
    made: frozenset[str] = frozenset()
    for each in types:
        made |= each
    return made


def _at(root: Any, reference: str) -> Any:
    """What a reference like `#/$defs/a` points at; None if nothing."""
    head, *path = reference.split("/")
    if head != "#":
        return None
    for step in path:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping):
            root = root.get(step)
        elif isinstance(root, list) and step.isdigit() and int(step) < len(root):
            root = root[int(step)]
        else:
            return None
    return root


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
