"""An assistant's turn as users read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function.

    Attributes:
        id: names the call; its result refers to it.
        name: the function's.
        arguments: JSON text of an object. It is the beginning of one if the turn was cut off there.
    """

    id: str
    name: str
    arguments: str

    def as_openai(self) -> dict[str, Any]:
        """The call as a message of OpenAI's chats has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantMessage:
    """A whole turn, read.

    Attributes:
        content: words for the user; None where a turn has calls or thoughts alone.
        reasoning: what the model thought first; None where nothing was told apart.
        tool_calls: in the order in which the model made them.
        num_reasoning_tokens: tokens of the thought.
    """

    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    num_reasoning_tokens: int = 0
