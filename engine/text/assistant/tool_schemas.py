"""What a request's tools say of a call's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.structured.closed import closed
from octavo.engine.text.assistant.tool import FunctionTool

_NOTES = ("description", "title", "examples", "default", "$comment")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "required")
_SAYS_NOTHING = ("uniqueItems", False)
"""A keyword that grammars do not know, as many libraries write it."""


def arguments_schema(tool: FunctionTool) -> dict[str, Any]:
    """The schema of a call's arguments, without notes; closed if the tool is strict."""
    schema = dict(without_notes(tool.parameters or {}))
    if not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"}:
        schema = {"type": "object", **schema}
    made: dict[str, Any] = closed(schema) if tool.is_strict else schema
    return made


def without_notes(schema: Any) -> Any:
    """The schema without what it says to readers alone."""
    if isinstance(schema, list):
        return [without_notes(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {}
    for key, value in schema.items():
        if key in _VALUES:
            made[key] = value
        elif key in _MAPS and isinstance(value, Mapping):
            made[key] = {name: without_notes(each) for name, each in value.items()}
        elif key not in _NOTES and (key, value) != _SAYS_NOTHING:
            made[key] = without_notes(value)
    return made


def names_of(tools: Sequence[FunctionTool]) -> frozenset[str]:
    """The functions that may be called."""
    return frozenset(tool.name for tool in tools)


def parameters_of(tools: Sequence[FunctionTool]) -> dict[str, Mapping[str, Any]]:
    """Schemas of arguments by the function's name."""
    return {tool.name: tool.parameters or {} for tool in tools}
