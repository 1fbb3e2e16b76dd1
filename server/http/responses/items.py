"""From items of a conversation, as Responses has them, to a chat's messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.server.template_names import MAX_MESSAGES

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXTS = ("input_text", "output_text", "text")
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}
MAX_ID_CHARS = 256
"""Of an item's own id that is kept."""
_KINDS = '"message", "function_call", "function_call_output" or "reasoning"'


def conversation(
    given: object, before: Sequence[dict[str, Any]] = ()
) -> tuple[list[dict[str, Any]], list[str]]:
    """A conversation as a chat has it.

    Thoughts, words and calls of the model that follow one another are one message.

    Args:
        given: the client's input.
        before: items that the input goes on from, as `as_stored` makes them.

    Returns:
        The chat's messages, and where each of them stands in the client's body.

    Raises:
        InvalidRequestError: names the item.
    """
    if not isinstance(given, str) and (not isinstance(given, list) or not given):
        raise InvalidRequestError("input", given, "text, or a list of at least one item")
    num_items = len(before) + (1 if isinstance(given, str) else len(given))
    if num_items > MAX_MESSAGES:
        shown = f"{num_items} items" + (" with those before" if before else "")
        raise InvalidRequestError("input", shown, f"at most {MAX_MESSAGES}")
    reading = _Conversation()
    for item in before:
        reading.add("previous_response_id", item)
    if isinstance(given, str):
        reading.add("input", {"role": "user", "content": given})
        return reading.messages, reading.places
    for index, item in enumerate(given):
        reading.add(f"input[{index}]", item)
    if reading.messages[-1].get("tool_calls"):
        allowed = "followed by a function_call_output"
        raise InvalidRequestError(f"input[{len(given) - 1}]", "a call", allowed)
    return reading.messages, reading.places


def as_stored(name: str, given: Any) -> list[dict[str, Any]]:
    """Items that `conversation` has taken, as they are kept: each with an id and its type, and
    nothing that is not read.

    Args:
        name: that ids are made of, for items without one.
        given: the client's input.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_stored(f"{name}i{index}", item) for index, item in enumerate(given)]


def _stored(name: str, item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    given_id = item.get("id")
    has_id = isinstance(given_id, str) and 0 < len(given_id) <= MAX_ID_CHARS
    head = {
        "id": given_id if has_id else f"{_ID_PREFIXES[kind]}_{name}",
        "type": kind,
        "status": "completed",
    }
    if kind == "function_call":
        return {**head, **{each: item[each] for each in ("call_id", "name", "arguments")}}
    if kind == "function_call_output":
        output = item["output"]
        made = output if isinstance(output, str) else _parts(output, "input_text")
        return {**head, "call_id": item["call_id"], "output": made}
    if kind == "reasoning":
        return {
            **head,
            "summary": _parts(item.get("summary") or [], "summary_text"),
            "content": _parts(item.get("content") or [], "reasoning_text"),
        }
    role, content = item["role"], item["content"]
    parts = [{"text": content}] if isinstance(content, str) else content
    part_kind = "output_text" if role == "assistant" else "input_text"
    return {**head, "role": role, "content": _parts(parts, part_kind)}


def _parts(parts: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [{"type": kind, "text": part["text"]} for part in parts]


class _Conversation:
    """Puts items together. `messages` and `places` are what `conversation` returns."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._turn: dict[str, Any] | None = None
        """The model's message, while its items follow one another."""
        self._call_ids: set[str] = set()
        """Of the calls whose outputs may come."""

    def add(self, place: str, item: object) -> None:
        """Adds the next item."""
        if not isinstance(item, dict):
            raise InvalidRequestError(place, item, f"an item: an object of type {_KINDS}")
        kind = item.get("type", "message")
        if kind == "message":
            self._message(place, item)
        elif kind == "reasoning":
            self._thought(place, item)
        elif kind == "function_call":
            self._call(place, item)
        elif kind == "function_call_output":
            self._output(place, item)
        else:
            raise InvalidRequestError(f"{place}.type", kind, f"{_KINDS}: others are not served")

    def _message(self, place: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            allowed = '"user", "assistant", "system" or "developer"'
            raise InvalidRequestError(f"{place}.role", role, allowed)
        content = _content(f"{place}.content", item.get("content"))
        if role == "assistant":
            turn = self._turn
            if turn is None or turn["content"] or turn.get("tool_calls"):
                turn = self._begin(place)
            turn["content"] = content
            return
        self._turn = None
        self._call_ids = set()
        self._append(place, {"role": _ROLES[role], "content": content})

    def _thought(self, place: str, item: dict[str, Any]) -> None:
        texts = []
        for name in ("content", "summary"):
            parts = item.get(name) or []
            if not isinstance(parts, list):
                raise InvalidRequestError(f"{place}.{name}", parts, "a list of texts")
            for index, part in enumerate(parts):
                text = part.get("text") if isinstance(part, dict) else None
                if not isinstance(text, str):
                    allowed = '{"type": "reasoning_text", "text": string}'
                    raise InvalidRequestError(f"{place}.{name}[{index}]", part, allowed)
                texts.append(text)
            if texts:
                break
        turn = self._turn
        if turn is None or turn["content"] or turn.get("tool_calls"):
            turn = self._begin(place)
        if texts:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + "".join(texts)

    def _call(self, place: str, item: dict[str, Any]) -> None:
        values: dict[str, str] = {}
        for name in ("call_id", "name", "arguments"):
            value = item.get(name)
            if not isinstance(value, str) or (not value and name != "arguments"):
                raise InvalidRequestError(f"{place}.{name}", value, "a string")
            values[name] = value
        try:
            arguments = json.loads(values["arguments"] or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            allowed = "the text of a JSON object"
            raise InvalidRequestError(f"{place}.arguments", values["arguments"], allowed)
        if self._turn is None:
            self._begin(place)
        assert self._turn is not None
        function = {"name": values["name"], "arguments": arguments}
        call = {"id": values["call_id"], "type": "function", "function": function}
        self._turn.setdefault("tool_calls", []).append(call)
        self._call_ids.add(values["call_id"])

    def _output(self, place: str, item: dict[str, Any]) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or call_id not in self._call_ids:
            known = ", ".join(sorted(self._call_ids))[:200]
            allowed = f"the call_id of a function_call before it ({known})"
            raise InvalidRequestError(f"{place}.call_id", call_id, allowed)
        content = _content(f"{place}.output", item.get("output"))
        self._turn = None
        self._append(place, {"role": "tool", "tool_call_id": call_id, "content": content})

    def _begin(self, place: str) -> dict[str, Any]:
        """A new message of the model."""
        self._turn = {"role": "assistant", "content": ""}
        self._call_ids = set()
        self._append(place, self._turn)
        return self._turn

    def _append(self, place: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.places.append(place)


def _content(field: str, content: object) -> str | list[dict[str, Any]]:
    """Text, or parts of text alone."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(field, content, "a string or a list of parts")
    made = []
    for index, part in enumerate(content):
        place = f"{field}[{index}]"
        if not isinstance(part, dict):
            raise InvalidRequestError(place, part, 'a part: an object with a "type"')
        if part.get("type") not in _TEXTS:
            allowed = '"input_text" or "output_text": other parts are not served'
            raise InvalidRequestError(f"{place}.type", part.get("type"), allowed)
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{place}.text", part.get("text"), "a string")
        made.append({"type": "text", "text": part["text"]})
    return made
