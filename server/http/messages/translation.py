"""From Anthropic's Messages to a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.server.http.messages.conversation import conversation, texts
from octavo.server.http.messages.protocol import CountTokensRequest, MessagesRequest
from octavo.server.http.protocol import ChatRequest
from octavo.server.http.translated import FieldNames, chat_of
from octavo.server.template_names import MAX_MESSAGES

_NAMES = (
    (r"max_(completion_)?tokens\b", "max_tokens"),
    (r"prompt\b", "messages"),
    (r"stop\b", "stop_sequences"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
    (r"parallel_tool_calls", "tool_choice.disable_parallel_tool_use"),
    (r"response_format(\.json_schema)?", "output_config.format"),
    (r"reasoning_effort", "output_config.effort"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
)
_SAME_NAMES = (
    *("model", "temperature", "top_p", "top_k", "seed", "stream", "priority", "timeout_s"),
    *("tenant", "cache_salt"),
)
_UNUSED_OF_TOOLS = ("cache_control", "eager_input_streaming")
_NEUTRAL_OF_TOOLS: Mapping[str, tuple[object, ...]] = {
    "allowed_callers": (["direct"], []),
    "defer_loading": (False,),
    "input_examples": ([],),
}
_MODES = {"auto": "auto", "any": "required", "none": "none"}


def translate(body: MessagesRequest | CountTokensRequest) -> tuple[ChatRequest, FieldNames]:
    """The chat that a body asks for, and what the body calls its fields.

    Raises:
        InvalidRequestError: names the field of the body.
    """
    if len(body.messages) > MAX_MESSAGES:
        given = f"{len(body.messages)} messages"
        raise InvalidRequestError("messages", given, f"at most {MAX_MESSAGES}")
    messages, places, goes_on = conversation(body.messages)
    if body.system is not None and (system := texts("system", body.system)):
        messages.insert(0, {"role": "system", "content": system})
        places.insert(0, "system")
    names = FieldNames(messages=places, others=_NAMES)
    values: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": goes_on or None,
        "tools": _tools(body.tools),
        **_choice(body.tool_choice),
        **_thinking(body),
        **_output(body.output_config),
    }
    if isinstance(body, MessagesRequest):
        values |= {name: getattr(body, name) for name in _SAME_NAMES}
        values["max_completion_tokens"] = body.max_tokens
        values["stop"] = body.stop_sequences
    else:
        values["model"] = body.model
    with names.named():
        return chat_of(values), names


def _tools(tools: object) -> list[dict[str, Any]] | None:
    if tools is None:
        return None
    if not isinstance(tools, list):
        allowed = 'a list of {"name": string, "input_schema": JSON schema}'
        raise InvalidRequestError("tools", tools, allowed)
    return [_tool(f"tools[{index}]", item) for index, item in enumerate(tools)]


def _tool(field: str, item: object) -> dict[str, Any]:
    if not isinstance(item, dict):
        allowed = '{"name": string, "description": string, "input_schema": JSON schema}'
        raise InvalidRequestError(field, item, allowed)
    given = {name: value for name, value in item.items() if value is not None}
    kind = given.pop("type", "custom")
    if kind != "custom":
        allowed = '"custom", or not given: tools that a server runs are not served'
        raise InvalidRequestError(f"{field}.type", kind, allowed)
    schema = given.pop("input_schema", None)
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{field}.input_schema", schema, "a JSON schema: an object")
    for name in _UNUSED_OF_TOOLS:
        given.pop(name, None)
    function = {
        name: given.pop(name) for name in ("name", "description", "strict") if name in given
    }
    for name, value in given.items():
        if value not in _NEUTRAL_OF_TOOLS.get(name, ()):
            raise InvalidRequestError(f"{field}.{name}", value, "not given: it is not served")
    return {"type": "function", "function": {**function, "parameters": schema}}


def _choice(choice: object) -> dict[str, Any]:
    """The chat's fields that say which tools are called."""
    if choice is None:
        return {}
    allowed = '{"type": "auto", "any" or "none"} or {"type": "tool", "name": string}'
    if not isinstance(choice, dict):
        raise InvalidRequestError("tool_choice", choice, allowed)
    kind = choice.get("type")
    made: dict[str, Any] = {}
    if kind == "tool":
        function = {"name": choice.get("name")}
        made["tool_choice"] = {"type": "function", "function": function}
    elif isinstance(kind, str) and kind in _MODES:
        made["tool_choice"] = _MODES[kind]
    else:
        raise InvalidRequestError("tool_choice.type", kind, allowed)
    single = choice.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        raise InvalidRequestError("tool_choice.disable_parallel_tool_use", single, "true or false")
    return made | ({"parallel_tool_calls": False} if single else {})


def _thinking(body: MessagesRequest | CountTokensRequest) -> dict[str, Any]:
    """The chat's fields that say whether the model thinks, and whether the answer tells it."""
    thinking, variables = body.thinking, body.chat_template_kwargs
    if thinking is None:
        return {"chat_template_kwargs": variables}
    kind = thinking.get("type") if isinstance(thinking, dict) else thinking
    if not isinstance(thinking, dict) or kind not in ("enabled", "disabled", "adaptive"):
        allowed = '"enabled", "disabled" or "adaptive"'
        raise InvalidRequestError("thinking.type", kind, allowed)
    budget = _budget(thinking.get("budget_tokens"), getattr(body, "max_tokens", None))
    display = thinking.get("display")
    if display not in (None, "summarized", "omitted"):
        raise InvalidRequestError("thinking.display", display, '"summarized" or "omitted"')
    if kind != "adaptive":
        variables = {"enable_thinking": kind == "enabled", **(variables or {})}
    return {
        "chat_template_kwargs": variables,
        "include_reasoning": False if display == "omitted" else None,
        "thinking_token_budget": budget if kind == "enabled" else None,
    }


def _budget(budget: object, max_tokens: int | None) -> int | None:
    """Most tokens of the thought; None where the turn ends before."""
    if budget is None:
        return None
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise InvalidRequestError("thinking.budget_tokens", budget, "an integer of at least 1")
    return None if max_tokens is not None and budget >= max_tokens - 1 else budget


def _output(config: object) -> dict[str, Any]:
    """The chat's fields that say how the answer looks."""
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise InvalidRequestError("output_config", config, 'an object with "effort" or "format"')
    for name, value in config.items():
        if name not in ("effort", "format") and value is not None:
            raise InvalidRequestError(f"output_config.{name}", value, "not given: not known here")
    made: dict[str, Any] = {"reasoning_effort": config.get("effort")}
    wanted = config.get("format")
    if wanted is not None:
        allowed = '{"type": "json_schema", "schema": JSON schema}'
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise InvalidRequestError("output_config.format", wanted, allowed)
        if not isinstance(wanted.get("schema"), dict):
            raise InvalidRequestError("output_config.format.schema", wanted.get("schema"), allowed)
        schema = {"name": "output", "schema": wanted["schema"]}
        made["response_format"] = {"type": "json_schema", "json_schema": schema}
    return made
