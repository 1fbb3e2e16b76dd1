"""The tools of a request, and what it says of calling them, as OpenAI's chats write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.engine.errors import InvalidRequestError
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.engine.text.assistant.tool import FunctionTool, ToolChoice

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 131_072
"""Of all tools of a request, written as JSON."""
NAME_ALLOWED = 'a string of 1 to 64 letters, digits, "_" and "-"'
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TOOL_ALLOWED = '{"type": "function", "function": {"name": string, "parameters": JSON schema}}'
_CHOICE_ALLOWED = (
    '"none", "auto", "required", {"type": "function", "function": {"name": string}} or '
    '{"type": "allowed_tools", "allowed_tools": {"mode": string, "tools": list}}'
)
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What one request says of tools.

    Attributes:
        shown: every tool, as the chat template gets it.
        callable: those that the turn may call; empty under `tool_choice: "none"`.
        choice: which calls it may and must make.
    """

    shown: tuple[dict[str, Any], ...]
    callable: tuple[FunctionTool, ...]
    choice: ToolChoice

    @property
    def must_keep_schemas(self) -> bool:
        """Whether calls have to match their schemas, or a call has to be made."""
        is_strict = any(tool.is_strict for tool in self.callable)
        return is_strict or self.choice.mode == "required"


def read_tool_use(
    tools: object, tool_choice: object = None, parallel_tool_calls: object = None
) -> ToolUse | None:
    """What a request says of tools; None if it has none.

    Args:
        tools: a list of OpenAI's tools; None or empty for none.
        tool_choice: as OpenAI's; None is "auto".
        parallel_tool_calls: whether a turn may make several calls; None is true.

    Raises:
        InvalidRequestError: one of them is malformed or beyond its limits, or the choice names no
            tool; names the field.
    """
    if parallel_tool_calls not in (None, True, False):
        raise InvalidRequestError("parallel_tool_calls", parallel_tool_calls, "true or false")
    if tools is None or (isinstance(tools, Sequence) and not tools):
        if tool_choice not in (None, "none", "auto"):
            raise InvalidRequestError("tool_choice", tool_choice, "given together with tools")
        return None
    read = read_tools(tools)
    mode, names = _read_choice(tool_choice, [tool.name for tool, _ in read])
    forced = names[0] if names is not None and _is_named(tool_choice) else None
    # Who names the function wants it called, once.
    is_parallel = parallel_tool_calls is not False and forced is None
    offered = [tool for tool, _ in read if names is None or tool.name in names]
    return ToolUse(
        shown=tuple(shown for _, shown in read),
        callable=() if mode == "none" else tuple(offered),
        choice=ToolChoice(mode, forced, is_parallel),
    )


def read_tools(tools: object) -> list[tuple[FunctionTool, dict[str, Any]]]:
    """The tools of a request, each with what a chat template gets of it.

    Raises: as `read_tool_use`.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InvalidRequestError("tools", tools, f"a list of {_TOOL_ALLOWED}")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}")
    read, names = [], set()
    num_chars = 0
    for index, item in enumerate(tools):
        tool, shown, size = _read_tool(f"tools[{index}]", item)
        if tool.name in names:
            allowed = "a name that no other tool has"
            raise InvalidRequestError(f"tools[{index}].function.name", tool.name, allowed)
        names.add(tool.name)
        num_chars += size
        if num_chars > MAX_TOOLS_CHARS:
            allowed = f"at most {MAX_TOOLS_CHARS} characters of JSON in all"
            raise InvalidRequestError("tools", "this", allowed)
        read.append((tool, shown))
    return read


def check_function_name(field: str, name: object) -> str:
    """The name, if it is one.

    Raises:
        InvalidRequestError: it is none.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(field, name, NAME_ALLOWED)
    return name


def _read_tool(field: str, item: object) -> tuple[FunctionTool, dict[str, Any], int]:
    """A tool, what templates get of it, and how many characters that is as JSON."""
    if not isinstance(item, Mapping):
        raise InvalidRequestError(field, item, _TOOL_ALLOWED)
    if item.get("type") != "function":
        allowed = '"function": only functions are served'
        raise InvalidRequestError(f"{field}.type", item.get("type"), allowed)
    function = item.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{field}.function", function, 'an object with a "name"')
    given = {key: value for key, value in function.items() if value is not None}
    name = check_function_name(f"{field}.function.name", given.get("name"))
    description = given.get("description")
    if not isinstance(description, str | None):
        raise InvalidRequestError(f"{field}.function.description", description, "a string")
    is_strict = given.pop("strict", False)
    if not isinstance(is_strict, bool):
        raise InvalidRequestError(f"{field}.function.strict", is_strict, "true or false")
    place = f"{field}.function.parameters"
    parameters = given.setdefault("parameters", dict(_NO_PARAMETERS))
    schema = _schema(place, parameters, is_strict=is_strict)
    shown = {key: value for key, value in item.items() if value is not None} | {"function": given}
    try:
        size = len(json.dumps(shown, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, item, f"JSON, not nested so deep ({error})") from None
    return FunctionTool(name, schema, description, is_strict), shown, size


def _schema(field: str, parameters: object, *, is_strict: bool) -> dict[str, Any]:
    """The schema of a call's arguments: of an object, always."""
    if not isinstance(parameters, Mapping):
        raise InvalidRequestError(field, parameters, "a JSON schema: an object")
    kind = parameters.get("type", "object")
    kinds = kind if isinstance(kind, list) else [kind]
    if "object" not in kinds:
        allowed = '"object", or not given: arguments are an object'
        raise InvalidRequestError(f"{field}.type", kind, allowed)
    checked = StructuredOutputsParams(
        json={**parameters, "type": "object"},
        disable_additional_properties=is_strict,
        asked_as=field,
    )
    schema: dict[str, Any] = json.loads(str(checked.json))
    return schema


def _read_choice(
    choice: object, known: Sequence[str]
) -> tuple[Literal["none", "auto", "required"], list[str] | None]:
    """The mode, and the names that may be called; None for all."""
    if choice is None:
        return "auto", None
    if isinstance(choice, str):
        if choice == "none":
            return "none", None
        if choice == "auto":
            return "auto", None
        if choice == "required":
            return "required", None
        raise InvalidRequestError("tool_choice", choice, _CHOICE_ALLOWED)
    if _is_named(choice):
        return "required", [_named_tool("tool_choice", choice, known)]
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        raise InvalidRequestError("tool_choice", choice, _CHOICE_ALLOWED)
    allowed = choice.get("allowed_tools")
    field = "tool_choice.allowed_tools"
    if not isinstance(allowed, Mapping):
        raise InvalidRequestError(field, allowed, 'an object with "mode" and "tools"')
    mode, listed = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidRequestError(f"{field}.mode", mode, '"auto" or "required"')
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise InvalidRequestError(f"{field}.tools", listed, "a list of at least one tool")
    names = [
        _named_tool(f"{field}.tools[{index}]", item, known) for index, item in enumerate(listed)
    ]
    return ("auto" if mode == "auto" else "required"), names


def _is_named(choice: object) -> bool:
    return isinstance(choice, Mapping) and choice.get("type") == "function"


def _named_tool(field: str, item: object, known: Sequence[str]) -> str:
    """The name that `{"type": "function", "function": {"name": …}}` holds, of a known tool."""
    function = item.get("function") if isinstance(item, Mapping) else None
    if not isinstance(function, Mapping):
        allowed = '{"type": "function", "function": {"name": string}}'
        raise InvalidRequestError(field, item, allowed)
    name = function.get("name")
    if name not in known:
        allowed = f"the name of one of tools ({', '.join(known)[:200]})"
        raise InvalidRequestError(f"{field}.function.name", name, allowed)
    return str(name)
