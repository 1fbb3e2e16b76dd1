"""A conversation as a chat template takes it; its oldest turns are forgotten where room ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.assistant.message import AssistantMessage, ToolCall

Message = dict[str, Any]


class Conversation:
    """What was said so far. A turn is a user's message, and all that follows up to the next one.

    Args:
        system: the system message; None for none.

    Attributes:
        system: as given; it may be changed at any time.
    """

    def __init__(self, system: str | None) -> None:
        self.system = system
        self._messages: list[Message] = []

    def reset(self) -> None:
        """Forgets all turns; the system message stays."""
        self._messages.clear()

    def say(self, role: str, content: str) -> None:
        """Appends a message of words alone."""
        self._messages.append({"role": role, "content": content})

    def answer(self, message: AssistantMessage) -> None:
        """Appends what the model said."""
        said: Message = {"role": "assistant", "content": message.content}
        if message.reasoning:
            said["reasoning_content"] = message.reasoning
        if message.tool_calls:
            said["tool_calls"] = [call.as_openai() for call in message.tool_calls]
        elif message.content is None:
            said["content"] = ""
        self._messages.append(said)

    def tell_result(self, call: ToolCall, result: str) -> None:
        """Appends what a call of a tool came to."""
        self._messages.append(
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}
        )

    def take_back(self) -> None:
        """Drops the newest turn, which got no answer."""
        del self._messages[self._begins[-1] :]

    def prompt(
        self, tokenizer: Any, max_tokens: int, names: Mapping[str, Any]
    ) -> tuple[str, list[int]]:
        """The prompt and its token ids; the oldest turns are forgotten until they fit `max_tokens`.

        Args:
            names: further names for the chat template, such as `tools`.

        Raises:
            InvalidRequestError: the newest turn alone does not fit, or the model has no template.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        for first in self._begins:
            kept = self._messages[first:]
            text: str = tokenizer.apply_chat_template([*system, *kept], **names)
            token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) <= max_tokens:
                self._messages = kept
                return text, token_ids
        raise InvalidRequestError(
            "message", f"{len(token_ids)} tokens", f"at most {max_tokens} tokens"
        )

    @property
    def _begins(self) -> list[int]:
        """Where turns begin."""
        return [i for i, message in enumerate(self._messages) if message["role"] == "user"]
