"""Calls of tools, and their results, in a conversation so far."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.errors import InvalidRequestError

MAX_CALLS = 512
"""Of one message."""
_CALL_ALLOWED = '{"id": string, "type": "function", "function": {"name", "arguments"}}'


class CallHistory:
    """Checks the messages of a conversation in their order, each tool's message against its call.

    Raises, from all its methods:
        InvalidRequestError: names the message's field.
    """

    def __init__(self) -> None:
        self._ids: list[str | None] | None = None
        """Of the calls whose results may stand here; None where none may."""

    def check(self, field: str, message: dict[str, Any]) -> None:
        """Checks the next message, and puts its calls into the form that templates read.

        Args:
            field: what errors call the message.
            message: without fields that are null; its `tool_calls` may be replaced.
        """
        role = message["role"]
        if "function_call" in message:
            allowed = "not given: calls are tool_calls"
            raise InvalidRequestError(f"{field}.function_call", message["function_call"], allowed)
        if role == "tool":
            self._check_result(field, message)
            return
        self._ids = None
        calls = message.get("tool_calls")
        if calls is None:
            return
        place = f"{field}.tool_calls"
        if role != "assistant":
            raise InvalidRequestError(place, calls, "not given: only an assistant calls tools")
        if not isinstance(calls, Sequence) or isinstance(calls, str) or len(calls) > MAX_CALLS:
            raise InvalidRequestError(place, calls, f"a list of at most {MAX_CALLS} calls")
        if not calls:
            del message["tool_calls"]
            return
        checked = [_checked_call(f"{place}[{index}]", call) for index, call in enumerate(calls)]
        message["tool_calls"] = checked
        self._ids = [call.get("id") for call in checked]

    def _check_result(self, field: str, message: Mapping[str, Any]) -> None:
        if self._ids is None:
            allowed = 'a message that follows an assistant\'s with "tool_calls", or their results'
            raise InvalidRequestError(f"{field}.role", "tool", allowed)
        call_id = message.get("tool_call_id")
        if call_id is None and None in self._ids:
            return  # results come in the order of the calls
        if not isinstance(call_id, str) or call_id not in self._ids:
            known = ", ".join(filter(None, self._ids))[:200]
            allowed = f"the id of a call in the assistant's message before it ({known})"
            raise InvalidRequestError(f"{field}.tool_call_id", call_id, allowed)


def with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, its calls' arguments as JSON text, for templates that write them as they are."""
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    written = [
        call | {"function": call["function"] | {"arguments": _text(call["function"]["arguments"])}}
        for call in calls
    ]
    return {**message, "tool_calls": written}


def _checked_call(field: str, call: object) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise InvalidRequestError(field, call, _CALL_ALLOWED)
    made = {key: value for key, value in call.items() if value is not None}
    if made.setdefault("type", "function") != "function":
        raise InvalidRequestError(f"{field}.type", made["type"], '"function"')
    if not isinstance(made.get("id", ""), str):
        raise InvalidRequestError(f"{field}.id", made["id"], "a string")
    function = made.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{field}.function", function, 'an object with a "name"')
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"{field}.function.name", name, "a string that is not empty")
    arguments = _arguments(f"{field}.function.arguments", function.get("arguments"))
    made["function"] = {**function, "arguments": arguments}
    return made


def _arguments(field: str, arguments: object) -> Mapping[str, Any]:
    """The arguments as an object; JSON text is read."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise InvalidRequestError(field, arguments, "a JSON object, or its text") from None
    if not isinstance(arguments, Mapping):
        raise InvalidRequestError(field, arguments, "a JSON object, or its text")
    return arguments


def _text(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)
