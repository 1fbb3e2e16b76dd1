"""What a chat gives its template, whatever protocol brings it."""

from __future__ import annotations

import marshal
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.assistant.tool_request import ToolUse

FIELD = "chat_template_kwargs"
MAX_MESSAGES = 8_192
MAX_NAMES, MAX_BYTES, MAX_NAME_CHARS = 64, 65_536, 256
_OWN_FIELDS = (
    *("messages", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template", "self", "tools"),
)


def template_names(
    given: Mapping[str, Any],
    use: ToolUse | None,
    *,
    generates: bool | None = None,
    goes_on: bool = False,
) -> dict[str, Any]:
    """What it gets besides the messages.

    Args:
        given: `chat_template_kwargs`.
        use: what the request says of tools.
        generates: whether the prompt ends with the opening of the assistant's turn; None, unless
            `goes_on`.
        goes_on: whether it ends within the last message.

    Raises:
        InvalidRequestError: a name that has a field of its own, or too many or too large ones.
    """
    if len(given) > MAX_NAMES or any(len(name) > MAX_NAME_CHARS for name in given):
        allowed = f"at most {MAX_NAMES}, of {MAX_NAME_CHARS} characters each"
        raise InvalidRequestError(FIELD, f"{len(given)} names", allowed)
    try:
        size = len(marshal.dumps(dict(given)))
    except ValueError:
        raise InvalidRequestError(FIELD, "this", "plain values, not so deep") from None
    if size > MAX_BYTES:
        raise InvalidRequestError(FIELD, f"{size} bytes", f"at most {MAX_BYTES} bytes")
    for name in _OWN_FIELDS:
        if name in given:
            raise InvalidRequestError(FIELD, name, "names other than this one")
    return {
        **given,
        **({} if use is None else {"tools": list(use.shown)}),
        "add_generation_prompt": not goes_on if generates is None else generates,
        "continue_final_message": goes_on,
    }
