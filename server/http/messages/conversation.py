"""From Anthropic's conversations to a chat's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.engine.errors import InvalidRequestError

_ROLES = ("user", "assistant", "system")


def conversation(
    messages: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[str], bool]:
    """A conversation as a chat has it.

    Returns:
        The chat's messages; where each of them stands in the client's; and whether the answer goes
        on with the last one.

    Raises:
        InvalidRequestError: names the message, and the block of it.
    """
    if not messages:
        raise InvalidRequestError("messages", messages, "at least one message")
    made: list[dict[str, Any]] = []
    places: list[str] = []
    open_ids: frozenset[str] = frozenset()
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = message.get("role")
        if role not in _ROLES:
            raise InvalidRequestError(f"{place}.role", role, '"user" or "assistant"')
        content = message.get("content")
        if role == "assistant":
            turn = _turn(f"{place}.content", content)
            open_ids = frozenset(call["id"] for call in turn.get("tool_calls", ()))
            parts = [turn]
        elif role == "user":
            parts = _said(f"{place}.content", content, open_ids)
            open_ids = frozenset()
        else:
            parts = [{"role": role, "content": texts(f"{place}.content", content)}]
            open_ids = frozenset()
        made += parts
        places += [place] * len(parts)
    if open_ids:
        allowed = "followed by a user's message with the results of its calls"
        raise InvalidRequestError(f"messages[{len(messages) - 1}]", "calls of tools", allowed)
    return made, places, messages[-1]["role"] == "assistant"


def texts(field: str, content: object) -> str | list[dict[str, Any]]:
    """Text, or blocks of text alone.

    Raises:
        InvalidRequestError: anything else.
    """
    if isinstance(content, str):
        return content
    blocks = _blocks(field, content)
    return [_text(f"{field}[{index}]", block, ('"text"',)) for index, block in enumerate(blocks)]


def _blocks(field: str, content: object) -> list[Any]:
    if not isinstance(content, list):
        raise InvalidRequestError(field, content, "a string or a list of blocks")
    return content


def _text(field: str, block: object, served: Sequence[str]) -> dict[str, Any]:
    """A block that must be text."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise InvalidRequestError(field, block, 'a block: an object with a "type"')
    if kind != "text":
        allowed = f"{' or '.join(served)}: other blocks are not served"
        raise InvalidRequestError(f"{field}.type", kind, allowed)
    text = block.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field}.text", text, "a string")
    return {"type": "text", "text": text}


def _said(field: str, content: object, open_ids: frozenset[str]) -> list[dict[str, Any]]:
    """A user's message: results of calls, each a message of its own, and what the user says."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results, words = [], []
    for index, block in enumerate(_blocks(field, content)):
        place = f"{field}[{index}]"
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            words.append(_text(place, block, ('"text"', '"tool_result"')))
            continue
        if words:
            allowed = "a block before those of text: results come first"
            raise InvalidRequestError(f"{place}.type", "tool_result", allowed)
        results.append(_result(place, block, open_ids))
    return results + ([{"role": "user", "content": words}] if words or not results else [])


def _result(field: str, block: dict[str, Any], open_ids: frozenset[str]) -> dict[str, Any]:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str) or call_id not in open_ids:
        known = ", ".join(sorted(open_ids))[:200]
        allowed = f"the id of a tool_use in the assistant's message before this one ({known})"
        raise InvalidRequestError(f"{field}.tool_use_id", call_id, allowed)
    failed = block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise InvalidRequestError(f"{field}.is_error", failed, "true or false")
    given = block.get("content")
    content = "" if given is None else texts(f"{field}.content", given)
    if failed:  # templates know of no errors: it is said in words
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        content = [{"type": "text", "text": "Error:"}, *parts]
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _turn(field: str, content: object) -> dict[str, Any]:
    """An assistant's message."""
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    words, thoughts = [], []
    calls: list[dict[str, Any]] = []
    served = ('"text"', '"thinking"', '"tool_use"')
    for index, block in enumerate(_blocks(field, content)):
        place = f"{field}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            calls.append(_call(place, block))
        elif kind == "thinking":
            thought = block.get("thinking")
            if not isinstance(thought, str):
                raise InvalidRequestError(f"{place}.thinking", thought, "a string")
            thoughts.append(thought)
        else:
            words.append(_text(place, block, served))
    made: dict[str, Any] = {"role": "assistant", "content": words or ""}
    if any(thoughts):
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _call(field: str, block: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, str] = {}
    for name in ("id", "name"):
        value = block.get(name)
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(f"{field}.{name}", value, "a string that is not empty")
        values[name] = value
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise InvalidRequestError(f"{field}.input", arguments, "an object")
    function = {"name": values["name"], "arguments": arguments or {}}
    return {"id": values["id"], "type": "function", "function": function}
