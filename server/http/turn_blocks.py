"""A turn as blocks that follow one another: thoughts, words and calls.

Messages and Responses both tell turns so. What a stream tells piece by piece and what an answer
tells at once come from the same blocks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.errors import NOT_FAILURES
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.text.assistant.events import (
    ArgumentsDelta,
    AssistantEvent,
    CallEnd,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from octavo.engine.text.assistant.turn_reader import TurnReader
from octavo.server.front import Front
from octavo.server.http.chat_turns import PreparedChat
from octavo.server.http.errors import encode
from octavo.server.http.streaming import answer_streamed, answer_whole


@dataclass(slots=True, kw_only=True)
class Block:
    """A part of a turn.

    Attributes:
        kind: what it is.
        index: its place in the turn.
        pieces: of its text, or of a call's arguments.
        call_id, name: of a call.
        is_whole: whether a call has come to its end; true of all else.
    """

    kind: Literal["thought", "words", "call"]
    index: int
    pieces: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    is_whole: bool = True

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class BlockNews:
    """What has happened to a block.

    Attributes:
        what: it begins, has grown by a piece, or has ended.
        piece: that it has grown by.
    """

    what: Literal["begins", "grows", "ends"]
    block: Block
    piece: str = ""


class TurnBlocks:
    """Reads the one turn that answers a chat.

    Args:
        chat: that is answered.
        tells_reasoning: whether thoughts are told.

    Attributes:
        blocks: so far.
        num_prompt_tokens, num_cached_tokens, num_tokens, num_reasoning_tokens: counts so far.
        finish_reason: the engine's; None until the turn has ended.
        stop: the stop string that ended it; None if none did.
    """

    def __init__(self, chat: PreparedChat, *, tells_reasoning: bool = True) -> None:
        self.blocks: list[Block] = []
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_tokens = self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self.stop: str | None = None
        self._chat = chat
        self._tells_reasoning = tells_reasoning
        self._reader: TurnReader | None = None
        self._open: Block | None = None

    @property
    def has_whole_calls(self) -> bool:
        """Whether there are calls, and the text has broken off none of them."""
        return self._reader is not None and self._reader.has_whole_calls

    def take(self, output: RequestOutput) -> list[BlockNews]:
        """What an output has news of: one that holds only what is new, or everything once."""
        [completion] = output.outputs
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_cached_tokens = output.num_cached_tokens
        self.num_tokens += len(completion.token_ids)
        plan = self._chat.plan
        if plan is None:
            events: list[AssistantEvent] = (
                [ContentDelta(completion.text)] if completion.text else []
            )
        else:
            if self._reader is None:
                turn = f"{output.engine_id or output.request_id}/0"
                self._reader = plan.reader(self._chat.engine.tokenizer, self._chat.ask.params, turn)
            events = self._reader.feed(completion.text, completion.token_ids)
            if completion.finished:
                events += self._reader.finish()
                self.num_reasoning_tokens = self._reader.num_reasoning_tokens
        news = [each for event in events for each in self._news(event)]
        if completion.finished:
            news += self._close()
            self.finish_reason = completion.finish_reason
            reason = completion.stop_reason
            self.stop = reason if isinstance(reason, str) else None
        return news

    def _news(self, event: AssistantEvent) -> Iterable[BlockNews]:
        match event:
            case ContentDelta(text):
                yield from self._grow("words", text)
            case ReasoningDelta(text):
                if self._tells_reasoning:
                    yield from self._grow("thought", text)
            case CallStart(_, name, call_id):
                yield from self._close()
                yield self._begin("call", call_id=call_id or "", name=name, is_whole=False)
            case ArgumentsDelta(_, text):
                yield from self._grow("call", text)
            case CallEnd():
                if self._open is not None:
                    self._open.is_whole = True
                yield from self._close()

    def _grow(self, kind: Literal["thought", "words", "call"], text: str) -> Iterable[BlockNews]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            yield self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        yield BlockNews("grows", self._open, text)

    def _begin(self, kind: Literal["thought", "words", "call"], **more: Any) -> BlockNews:
        self._open = Block(kind=kind, index=len(self.blocks), **more)
        self.blocks.append(self._open)
        return BlockNews("begins", self._open)

    def _close(self) -> list[BlockNews]:
        block, self._open = self._open, None
        return [] if block is None else [BlockNews("ends", block)]


class BlockAnswer(Protocol):
    """Tells a turn as one API does."""

    def news(self, output: RequestOutput) -> bytes:
        """The events of a stream that an output makes; may be empty."""
        ...

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The answer at once."""
        ...

    def failed(self, status: int, content: dict[str, Any]) -> bytes:
        """The event of a stream that tells of an error: its status, and OpenAI's object of it."""
        ...

    def left(self) -> None:
        """Takes note that nobody reads the stream any more."""
        ...


async def respond(
    front: Front,
    request: Request,
    chat: PreparedChat,
    answer: BlockAnswer,
    headers: dict[str, str],
) -> Response:
    """Generates the turn, and answers with it."""
    outputs = front.generate(chat.prompt, chat.ask.params, chat.request_id, **chat.ask.options)
    headers = {"x-request-id": chat.request_id, **headers}
    if chat.ask.stream:
        return await answer_streamed(request, _events(outputs, answer), headers, answer.failed)
    return await answer_whole(request, _whole(outputs, answer), headers)


async def _whole(outputs: AsyncGenerator[RequestOutput, None], answer: BlockAnswer) -> bytes:
    async with aclosing(outputs):
        [last] = [output async for output in outputs]
    return encode(answer.whole(last))


async def _events(
    outputs: AsyncGenerator[RequestOutput, None], answer: BlockAnswer
) -> AsyncGenerator[bytes, None]:
    async with aclosing(outputs):
        try:
            async for output in outputs:
                if data := answer.news(output):
                    yield data
        except NOT_FAILURES:
            answer.left()
            raise
