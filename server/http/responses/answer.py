"""From turns to OpenAI's responses and their events."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from octavo.engine.output.outputs import RequestOutput
from octavo.server.http.chat_turns import PreparedChat
from octavo.server.http.responses.history import Keep
from octavo.server.http.responses.protocol import ResponsesRequest
from octavo.server.http.streaming import named_event
from octavo.server.http.turn_blocks import Block, BlockNews, TurnBlocks

_PREFIXES = {"words": "msg", "thought": "rs", "call": "fc"}
_TEXTS = {"words": "output_text", "thought": "reasoning_text"}


class ResponsesAnswer:
    """Tells a turn as Responses does.

    Args:
        name: hexadecimal digits that ids are made of; no other answer has them.
        body: what was asked for: the answer repeats it.
        chat: that is answered.
        keep: keeps the response when it has ended; None if it is not to be kept.
    """

    def __init__(
        self, name: str, body: ResponsesRequest, chat: PreparedChat, keep: Keep | None = None
    ) -> None:
        self._name = name
        self._keep = keep
        self._is_cut = False
        """Whether the turn broke off, by an error or because the client left."""
        self._turn = TurnBlocks(chat)
        self._num_events = 0
        params = chat.ask.params
        asked = body.model_dump(by_alias=True, exclude_none=True)
        self._head: dict[str, Any] = {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": int(time.time()),
            "model": chat.engine.model_name,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | asked.get("reasoning", {}),
            "store": keep is not None,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}} | asked.get("text", {}),
            "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
            "tools": body.tools or [],
            "top_p": params.top_p,
            "truncation": "disabled",
        }

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The response."""
        self._turn.take(output)
        return self._kept(self._response(self._end()))

    def news(self, output: RequestOutput) -> bytes:
        """The events that an output makes."""
        news = self._turn.take(output)
        events: list[dict[str, Any]] = []
        if not self._num_events:
            begun = {**self._head, **self._state("in_progress"), "output": [], "usage": None}
            events += [
                {"type": f"response.{kind}", "response": begun}
                for kind in ("created", "in_progress")
            ]
        events += [event for each in news for event in self._events(each)]
        if self._turn.finish_reason is not None:
            status = self._end()
            kind = "completed" if status == "completed" else "incomplete"
            response = self._kept(self._response(status))
            events.append({"type": f"response.{kind}", "response": response})
        return b"".join([self._numbered(event) for event in events])

    def failed(self, status: int, content: dict[str, Any]) -> bytes:
        """The event that tells of an error."""
        self._is_cut = True
        error = {"code": "server_error", "message": content["error"]["message"]}
        response = self._kept(self._response("failed") | {"error": error})
        return self._numbered({"type": "response.failed", "response": response})

    def left(self) -> None:
        """Keeps what there is of a stream that the client left before its end."""
        if self._num_events and self._turn.finish_reason is None:
            self._is_cut = True
            self._kept(self._response("cancelled"))

    def _kept(self, response: dict[str, Any]) -> dict[str, Any]:
        """The response, which is kept before the client is told of its end."""
        if self._keep is not None and not self._keep(response):
            response["store"] = False
        return response

    def _numbered(self, event: dict[str, Any]) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event({**event, "sequence_number": number})

    def _end(self) -> str:
        """The status of a turn that has ended."""
        return {"length": "incomplete", "cancelled": "cancelled"}.get(
            self._turn.finish_reason or "", "completed"
        )

    def _state(self, status: str) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {"status": status, "error": None, "incomplete_details": details}

    def _response(self, status: str) -> dict[str, Any]:
        turn = self._turn
        usage = {
            "input_tokens": turn.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": turn.num_cached_tokens},
            "output_tokens": turn.num_tokens,
            "output_tokens_details": {"reasoning_tokens": turn.num_reasoning_tokens},
            "total_tokens": turn.num_prompt_tokens + turn.num_tokens,
        }
        output = [self._item(block) for block in turn.blocks]
        return {**self._head, **self._state(status), "output": output, "usage": usage}

    def _events(self, news: BlockNews) -> Iterable[dict[str, Any]]:
        block = news.block
        item: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        place = item | {"content_index": 0}
        is_call = block.kind == "call"
        if news.what == "begins":
            yield self._told("added", block, self._item(block, begins=True))
            if not is_call:
                part = _part(block, "")
                yield {"type": "response.content_part.added", **place, "part": part}
        elif news.what == "grows":
            if is_call:
                kind = "response.function_call_arguments.delta"
                yield {"type": kind, **item, "delta": news.piece}
            else:
                kind = f"response.{_TEXTS[block.kind]}.delta"
                yield {"type": kind, **place, "delta": news.piece, **_scores(block)}
        else:
            text = block.text
            if is_call:
                kind = "response.function_call_arguments.done"
                yield {"type": kind, **item, "name": block.name, "arguments": text}
            else:
                kind = f"response.{_TEXTS[block.kind]}.done"
                yield {"type": kind, **place, "text": text, **_scores(block)}
                part = _part(block, text)
                yield {"type": "response.content_part.done", **place, "part": part}
            yield self._told("done", block, self._item(block))

    def _told(self, what: str, block: Block, item: dict[str, Any]) -> dict[str, Any]:
        kind = f"response.output_item.{what}"
        return {"type": kind, "output_index": block.index, "item": item}

    def _id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._name}{block.index}"

    def _item(self, block: Block, *, begins: bool = False) -> dict[str, Any]:
        """A block as an item of the output: as it begins, or as it is."""
        head = {"id": self._id(block), "status": "in_progress" if begins else self._status(block)}
        text = "" if begins else block.text
        content = [] if begins else [_part(block, text)] if block.kind != "call" else []
        if block.kind == "call":
            names = {"call_id": block.call_id, "name": block.name}
            return {**head, "type": "function_call", **names, "arguments": text}
        if block.kind == "thought":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _status(self, block: Block) -> str:
        is_last = block.index + 1 == len(self._turn.blocks)
        is_cut = self._is_cut or self._turn.finish_reason in ("length", "cancelled")
        return "incomplete" if (is_last and is_cut) or not block.is_whole else "completed"


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "thought":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _scores(block: Block) -> dict[str, Any]:
    """Log-probabilities of words: none are served, and clients want the list."""
    return {"logprobs": []} if block.kind == "words" else {}
