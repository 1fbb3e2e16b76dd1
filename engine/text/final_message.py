"""Prompts that end within their last message, for the model to go on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.errors import InvalidRequestError

_MARK = "\ue000the final message ends here\ue001"
"""Stands at the end of the last message while a template writes it; characters of no script."""


def with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The messages, the last one's end marked.

    Raises:
        InvalidRequestError: the last message has no text at its end to go on with.
    """
    last = messages[-1] if isinstance(messages, Sequence) and messages else None
    content = last.get("content") if isinstance(last, Mapping) else None
    if isinstance(content, str):
        marked: Any = content + _MARK
    elif (
        isinstance(content, list)
        and content
        and isinstance(content[-1], Mapping)
        and isinstance(content[-1].get("text"), str)
    ):
        marked = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _MARK}]
    else:
        allowed = "not given, unless the last message has text to go on with"
        raise InvalidRequestError("continue_final_message", True, allowed)
    assert isinstance(last, Mapping)
    return [*messages[:-1], {**last, "content": marked}]


def before_mark(text: str) -> str:
    """What a template wrote up to the end of the last message.

    Raises:
        InvalidRequestError: the template did not write the message.
    """
    before, found, _ = text.rpartition(_MARK)
    if not found:
        allowed = "not given: the chat template does not write the last message"
        raise InvalidRequestError("continue_final_message", True, allowed)
    return before.replace(_MARK, "")  # a template may write it twice
