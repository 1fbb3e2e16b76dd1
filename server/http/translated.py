"""Bodies of other APIs as chats: one request behind all of them.

A translation checks what the chat's own checks cannot name. Whatever the chat refuses is named as
the client wrote it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from octavo.engine.errors import InvalidRequestError, shorten
from octavo.server.http.protocol import ChatRequest, refusal

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """What the client calls the fields of a chat.

    Attributes:
        messages: where each message of the chat stands in the client's body.
        others: pattern of a chat's field, from its beginning, and the client's name for that part.
    """

    messages: Sequence[str]
    others: Sequence[tuple[str, str]]

    def of(self, name: str) -> str:
        """The client's name of a field."""
        if found := _MESSAGE.match(name):
            index = int(found[1])
            if index < len(self.messages):
                return self.messages[index] + name[found.end() :]
        for pattern, other in self.others:
            if found := re.match(pattern, name):
                return found.expand(other) + name[found.end() :]
        return name

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Has errors name fields as the client does."""
        try:
            yield
        except InvalidRequestError as error:
            name = self.of(error.field)
            if name != error.field:
                error.field = name
                error.args = (f"{name} = {shorten(error.value)} is not allowed: {error.allowed}",)
            raise


def chat_of(values: Mapping[str, Any]) -> ChatRequest:
    """The chat with these fields; those that are None are not given.

    Raises:
        InvalidRequestError: one of them is not of its type, or out of its range.
    """
    try:
        return ChatRequest.model_validate(
            {name: value for name, value in values.items() if value is not None}
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise refusal(first["type"], first["loc"], first["input"], first["msg"]) from None
