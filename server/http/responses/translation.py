"""From OpenAI's Responses to a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.server.http.protocol import ChatRequest
from octavo.server.http.responses.items import conversation
from octavo.server.http.responses.protocol import InputTokensRequest, ResponsesRequest, TextFormat
from octavo.server.http.translated import FieldNames, chat_of

_NAMES = (
    (r"max_(completion_)?tokens\b", "max_output_tokens"),
    (r"prompt\b", "input"),
    (r"messages\b", "input"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.allowed_tools(\.tools\[\d+\])?(\.function)?", r"tool_choice\1"),
    (r"tool_choice\.function", "tool_choice"),
    (r"response_format\.json_schema", "text.format.schema"),
    (r"response_format", "text.format"),
    (r"reasoning_effort", "reasoning.effort"),
)
_SAME_NAMES = (
    *("model", "temperature", "top_p", "top_k", "seed", "stream", "priority", "timeout_s"),
    *("tenant", "cache_salt"),
)
_INCLUDED = ("reasoning.encrypted_content",)


def translate(
    body: ResponsesRequest | InputTokensRequest, before: Sequence[dict[str, Any]] = ()
) -> tuple[ChatRequest, FieldNames]:
    """The chat that a body asks for, and what the body calls its fields.

    Args:
        before: items of the conversation that the body goes on from.

    Raises:
        InvalidRequestError: names the field of the body.
    """
    messages, places = conversation(body.input, before)
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
        places.insert(0, "instructions")
    names = FieldNames(messages=places, others=_NAMES)
    values: dict[str, Any] = {
        "messages": messages,
        "tools": _tools(body.tools),
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
        "response_format": body.text and _format(body.text.format),
        "chat_template_kwargs": body.chat_template_kwargs,
        "model": body.model,
    }
    if isinstance(body, ResponsesRequest):
        check_included(body.include or ())
        values |= {name: getattr(body, name) for name in _SAME_NAMES}
        values["max_completion_tokens"] = body.max_output_tokens
    with names.named():
        return chat_of(values), names


def check_included(names: Sequence[str]) -> None:
    """Refuses to include what is not served.

    Raises:
        InvalidRequestError: names the entry.
    """
    for index, name in enumerate(names):
        if name not in _INCLUDED:
            allowed = f"{_INCLUDED[0]!r}, or not given: it is not served"
            raise InvalidRequestError(f"include[{index}]", name, allowed)


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    allowed = '{"type": "function", "name": string, "parameters": JSON schema}'
    if not isinstance(tools, list):
        raise InvalidRequestError("tools", tools, f"a list of {allowed}")
    made = []
    for index, item in enumerate(tools):
        field = f"tools[{index}]"
        if not isinstance(item, dict):
            raise InvalidRequestError(field, item, allowed)
        if item.get("type") != "function":
            served = '"function": tools that a server runs are not served'
            raise InvalidRequestError(f"{field}.type", item.get("type"), served)
        known = ("name", "description", "parameters", "strict")
        for name, value in item.items():
            if name not in (*known, "type") and value not in (None, False):
                raise InvalidRequestError(f"{field}.{name}", value, "not given: it is not served")
        function = {name: item[name] for name in known if item.get(name) is not None}
        made.append({"type": "function", "function": function})
    return made


def _choice(choice: object) -> object:
    """The chat's choice: its functions' names are one level further in."""
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return _named(choice)
    if kind == "allowed_tools":
        listed = choice.get("tools")
        tools = [_named(item) for item in listed] if isinstance(listed, list) else listed
        return {
            "type": kind,
            "allowed_tools": {"mode": choice.get("mode"), "tools": tools},
        }
    allowed = '"function" or "allowed_tools"'
    raise InvalidRequestError("tool_choice.type", kind, allowed)


def _named(item: object) -> object:
    if not isinstance(item, Mapping):
        return item
    return {"type": "function", "function": {"name": item.get("name")}}


def _format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema_ is None:
        raise InvalidRequestError("text.format.schema", None, "a JSON schema: an object")
    schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}
