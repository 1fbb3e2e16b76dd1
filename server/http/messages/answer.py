"""From turns to Anthropic's messages and their events."""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import from_json

from octavo.engine.output.outputs import RequestOutput
from octavo.server.http.chat_turns import PreparedChat
from octavo.server.http.error_shapes import MESSAGES_PATH, shaped
from octavo.server.http.streaming import named_event
from octavo.server.http.turn_blocks import Block, BlockNews, TurnBlocks

_DELTAS = {
    "words": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesAnswer:
    """Tells a turn as Messages does.

    Args:
        message_id: of the answer.
        chat: that is answered.
        tells_reasoning: whether there are blocks of thinking.
    """

    def __init__(self, message_id: str, chat: PreparedChat, *, tells_reasoning: bool) -> None:
        self._id = message_id
        self._model = chat.engine.model_name
        self._tells_counts = chat.plan is not None and chat.plan.reasoning is not None
        self._turn = TurnBlocks(chat, tells_reasoning=tells_reasoning)
        self._has_begun = False

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The message."""
        self._turn.take(output)
        return self._message([_block(block) for block in self._turn.blocks], **self._end())

    def news(self, output: RequestOutput) -> bytes:
        """The events that an output makes."""
        news = self._turn.take(output)
        events = []
        if not self._has_begun:
            self._has_begun = True
            message = self._message([], stop_reason=None, stop_sequence=None)
            message["usage"]["output_tokens"] = 0
            events.append({"type": "message_start", "message": message})
        events += [_event(each) for each in news]
        if self._turn.finish_reason is not None:
            events.append({"type": "message_delta", "delta": self._end(), "usage": self._usage()})
            events.append({"type": "message_stop"})
        return b"".join([named_event(event) for event in events])

    def failed(self, status: int, content: dict[str, Any]) -> bytes:
        """The event that tells of an error."""
        return named_event(shaped(MESSAGES_PATH, status, content))

    def left(self) -> None:
        """Nothing is kept of a message."""

    def _message(self, content: list[dict[str, Any]], **end: str | None) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **end,
            "usage": self._usage(),
        }

    def _end(self) -> dict[str, str | None]:
        turn = self._turn
        reason, stop = "end_turn", None
        if turn.finish_reason == "length":
            reason = "max_tokens"
        elif turn.has_whole_calls:
            reason = "tool_use"
        elif turn.stop is not None:
            reason, stop = "stop_sequence", turn.stop
        return {"stop_reason": reason, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        turn = self._turn
        usage: dict[str, Any] = {
            "input_tokens": turn.num_prompt_tokens - turn.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": turn.num_cached_tokens,
            "output_tokens": turn.num_tokens,
        }
        if self._tells_counts:
            usage["output_tokens_details"] = {"thinking_tokens": turn.num_reasoning_tokens}
        return usage


def _event(news: BlockNews) -> dict[str, Any]:
    index = news.block.index
    if news.what == "begins":
        return {"type": "content_block_start", "index": index, "content_block": _empty(news.block)}
    if news.what == "ends":
        return {"type": "content_block_stop", "index": index}
    kind, name = _DELTAS[news.block.kind]
    delta = {"type": kind, name: news.piece}
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _empty(block: Block) -> dict[str, Any]:
    """The block as it begins."""
    if block.kind == "words":
        return {"type": "text", "text": ""}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _block(block: Block) -> dict[str, Any]:
    """The block, whole."""
    if block.kind == "call":
        return _empty(block) | {"input": call_input(block.text)}
    return _empty(block) | {_DELTAS[block.kind][1]: block.text}


def call_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object: as much of it as the text holds, if it was cut off."""
    try:
        value = from_json(arguments, allow_partial=True, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # a number may be beyond what JSON's writer takes
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
