"""What a request's tools say of a call's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.structured.closed import closed
from octavo.engine.text.assistant.tool import FunctionTool


def arguments_schema(tool: FunctionTool) -> dict[str, Any]:
    """The schema of a call's arguments; closed if the tool is strict."""
    schema = dict(tool.parameters or {})
    if not schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"}:
        schema = {"type": "object", **schema}
    made: dict[str, Any] = closed(schema) if tool.is_strict else schema
    return made


def names_of(tools: Sequence[FunctionTool]) -> frozenset[str]:
    """The functions that may be called."""
    return frozenset(tool.name for tool in tools)


def parameters_of(tools: Sequence[FunctionTool]) -> dict[str, Mapping[str, Any]]:
    """Schemas of arguments by the function's name."""
    return {tool.name: tool.parameters or {} for tool in tools}
