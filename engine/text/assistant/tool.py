"""Functions that a model may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function that a request offers to the model.

    Attributes:
        name: 1 to 64 of letters, digits, "_" and "-".
        parameters: JSON schema of the arguments' object; None for any object.
        description: what the function does, for the model.
        is_strict: whether a call's arguments must match the schema, in every mode.
    """

    name: str
    parameters: Mapping[str, Any] | None = None
    description: str | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls a turn may and must make.

    Attributes:
        mode: "none" forbids calls, "auto" leaves it to the model, "required" demands one or more.
        name: with "required", the one function to call.
        is_parallel: whether a turn may make several calls.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    is_parallel: bool = True


def allowed_tools(tools: Sequence[FunctionTool], choice: ToolChoice) -> list[FunctionTool]:
    """The tools that the choice leaves."""
    if choice.mode == "none":
        return []
    return [tool for tool in tools if choice.name in (None, tool.name)]
