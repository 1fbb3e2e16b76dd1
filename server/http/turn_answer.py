"""Chats' answers whose text is read for calls of tools and for thoughts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from octavo.engine.output.outputs import CompletionOutput, RequestOutput
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.assistant.events import (
    ArgumentsDelta,
    AssistantEvent,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from octavo.engine.text.assistant.message import AssistantMessage
from octavo.engine.text.assistant.turn_plan import TurnPlan
from octavo.engine.text.assistant.turn_reader import TurnReader
from octavo.engine.text.tokenizer import Tokenizer
from octavo.server.http.answers import ChatAnswer, Telling, Usage


class TurnAnswer(ChatAnswer):
    """Objects of /v1/chat/completions, with what the text says of calls and thoughts.

    Args:
        request_id: of the answer.
        model: the served model's name.
        params: as the engine got them.
        tokenizer: of the model.
        tells: what there is besides the text.
        plan: how turns are read.
        tells_reasoning: whether the answer holds thoughts.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        params: SamplingParams,
        tokenizer: Tokenizer,
        tells: Telling,
        plan: TurnPlan,
        *,
        tells_reasoning: bool,
    ) -> None:
        super().__init__(request_id, model, params.n, tokenizer, tells)
        self._params = params
        self._plan = plan
        self._tells_reasoning = tells_reasoning
        self._readers: dict[int, TurnReader] = {}

    def events(self, place: int, output: RequestOutput, usage: Usage) -> list[list[dict[str, Any]]]:
        """The choices that an output of a stream has news of, one in each event."""
        output = self._shown(output)
        usage.saw(place, output)
        events = []
        for completion in output.outputs:
            if self._has_news(place, completion):
                if not self._begun:
                    self._untold = self._beside(output)
                events += [[choice] for choice in self._news(output, completion, usage)]
        return events

    def _choices(self, place: int, output: RequestOutput, usage: Usage) -> list[dict[str, Any]]:
        choices = []
        for completion in output.outputs:
            reader = self._reader(output, completion)
            reader.feed(completion.text, completion.token_ids)
            reader.finish()
            self._count(reader, usage)
            ended = self._ended_by(reader, completion)
            message = message_json(reader.message(), tells_reasoning=self._tells_reasoning)
            choices.append(self._said(ended, "message", message))
        return choices

    def _news(
        self, output: RequestOutput, completion: CompletionOutput, usage: Usage
    ) -> list[dict[str, Any]]:
        """The choices of a completion's news, each with one piece of it."""
        reader = self._reader(output, completion)
        events = reader.feed(completion.text, completion.token_ids)
        if completion.finished:
            events += reader.finish()
            self._count(reader, usage)
            completion = self._ended_by(reader, completion)
        deltas = list(deltas_json(events, tells_reasoning=self._tells_reasoning))
        if completion.index not in self._begun:
            self._begun.add(completion.index)
            first = deltas[0] if deltas else {}
            deltas[:1] = [{"role": "assistant", "content": None, **first}]
        has_more = completion.finished or completion.logprobs
        if not deltas and (has_more or (self._tells.token_ids and completion.token_ids)):
            deltas = [{}]
        # The tokens stand beside the first piece, the end beside the last one.
        choices = []
        for index, delta in enumerate(deltas):
            said = completion
            if index > 0:
                said = dataclasses.replace(said, token_ids=[], logprobs=None)
            if index < len(deltas) - 1:
                said = dataclasses.replace(said, finish_reason=None, stop_reason=None)
            choices.append(self._said(said, "delta", delta))
        return choices

    def _reader(self, output: RequestOutput, completion: CompletionOutput) -> TurnReader:
        reader = self._readers.get(completion.index)
        if reader is None:
            turn = f"{output.engine_id or output.request_id}/{completion.index}"
            reader = self._plan.reader(self._tokenizer, self._params, turn)
            self._readers[completion.index] = reader
        return reader

    def _ended_by(self, reader: TurnReader, completion: CompletionOutput) -> CompletionOutput:
        """The completion with the reason for its end that OpenAI gives: calls, unless the request
        has named the one to make."""
        calls = completion.finish_reason == "stop" and reader.has_whole_calls
        if not calls or self._plan.is_named:
            return completion
        return dataclasses.replace(completion, finish_reason="tool_calls")

    def _count(self, reader: TurnReader, usage: Usage) -> None:
        if self._plan.reasoning is not None:
            usage.num_reasoning_tokens = (
                usage.num_reasoning_tokens or 0
            ) + reader.num_reasoning_tokens


def message_json(message: AssistantMessage, *, tells_reasoning: bool) -> dict[str, Any]:
    """OpenAI's message of a whole turn."""
    made: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning is not None and tells_reasoning:
        made |= _thought(message.reasoning)
    if message.tool_calls:
        made["tool_calls"] = [call.as_openai() for call in message.tool_calls]
    return made


def deltas_json(
    events: Iterable[AssistantEvent], *, tells_reasoning: bool
) -> Iterable[dict[str, Any]]:
    """OpenAI's deltas of a stream, one for each event that a client is told of."""
    for event in events:
        match event:
            case ContentDelta(text):
                yield {"content": text}
            case ReasoningDelta(text):
                if tells_reasoning:
                    yield _thought(text)
            case CallStart(index, name, call_id):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                yield {"tool_calls": [call]}
            case ArgumentsDelta(index, text):
                yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _thought(text: str) -> dict[str, Any]:
    """A thought, under the two names that clients know."""
    return {"reasoning_content": text, "reasoning": text}
