"""Chats over gRPC: from their message to what the engine takes, and from turns to messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import Prompt
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.sampling_defaults import SamplingDefaults
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.text.assistant.events import (
    ArgumentsDelta,
    AssistantEvent,
    CallStart,
    ContentDelta,
    ReasoningDelta,
)
from octavo.engine.text.assistant.message import ToolCall
from octavo.engine.text.assistant.tool_request import ToolUse, read_tool_use
from octavo.engine.text.assistant.turn_plan import TurnPlan, check_thought_budget, model_formats
from octavo.engine.text.assistant.turn_reader import TurnReader
from octavo.server.beside_loop import beside_loop
from octavo.server.front import Front
from octavo.server.output_message import FINISH_REASONS, timings_message
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.sampling_message import sampling_params_from_message
from octavo.server.template_names import FIELD, MAX_BYTES, MAX_MESSAGES, template_names

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

_CHOICES = ("", "auto", "none", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcChat:
    """A chat as the engine takes it.

    Attributes:
        prompt: its tokens.
        params: how its turn is generated, with what the model's formats need.
        plan: how the turn is read; None if all that it says is content.
    """

    prompt: Prompt
    params: SamplingParams
    plan: TurnPlan | None


async def prepare_chat(front: Front, request: pb.ChatRequest, kind: RequestOutputKind) -> GrpcChat:
    """Checks a chat, renders it and tokenizes it.

    Args:
        kind: what each output of the engine is to hold.

    Raises:
        InvalidRequestError: a value that cannot be served; names the field.
    """
    engine = front.ready_engine()

    def read() -> tuple[SamplingParams, TurnPlan | None, dict[str, Any], list[dict[str, Any]]]:
        params, use = _params(request, engine.sampling_defaults, kind), _tool_use(request)
        plan = model_formats(engine.config, engine.tokenizer).plan(use, _budget(request))
        return params, plan, _names(request, use), _messages(request)

    params, plan, names, messages = await beside_loop(read)
    try:
        text = await front.render_chat(messages, names)
    except InvalidRequestError as error:
        # The chat's own checks speak of OpenAI's shape.
        raise InvalidRequestError(_field(error.field), error.value, error.allowed) from None
    prompt = await engine.tokenize(text, add_special_tokens=False)

    def finish() -> GrpcChat:
        if plan is None:
            return GrpcChat(prompt=prompt, params=params, plan=None)
        opened = plan.opened_by(text)
        made = opened.constrained(params, engine.tokenizer)
        return GrpcChat(prompt=prompt, params=made, plan=opened)

    # The grammar of many tools takes a second: other answers must not wait for it.
    has_tools = plan is not None and plan.use is not None
    return await asyncio.to_thread(finish) if has_tools else finish()


class ChatEncoder:
    """Turns the outputs of one chat into messages.

    Args:
        engine: that serves it.
        chat: that is answered.
    """

    def __init__(self, engine: AsyncEngine, chat: GrpcChat) -> None:
        self._engine = engine
        self._chat = chat
        self._reader: TurnReader | None = None
        self._num_tokens = 0

    def encode(self, output: RequestOutput) -> pb.ChatResponse | None:
        """The message of the chat's next output; None if it has no news."""
        [completion] = output.outputs
        self._num_tokens += len(completion.token_ids)
        events, plan = list[AssistantEvent](), self._chat.plan
        if plan is None:
            events += [ContentDelta(completion.text)] if completion.text else []
        else:
            if self._reader is None:
                turn = f"{output.engine_id or output.request_id}/0"
                self._reader = plan.reader(self._engine.tokenizer, self._chat.params, turn)
            events += self._reader.feed(completion.text, completion.token_ids)
            if completion.finished:
                events += self._reader.finish()
        if not events and not output.finished:
            return None
        message = pb.ChatResponse(
            request_id=output.request_id, model=self._engine.model_name, finished=output.finished
        )
        _tell(message, events)
        if output.finished:
            self._end(message, output)
        return message

    def _end(self, message: pb.ChatResponse, output: RequestOutput) -> None:
        reason = output.outputs[0].finish_reason or ""
        if reason == "stop" and self._reader is not None and self._reader.has_whole_calls:
            reason = "tool_calls"
        message.finish_reason = FINISH_REASONS[reason]
        message.usage.prompt_tokens = len(output.prompt_token_ids)
        message.usage.cached_tokens = output.num_cached_tokens
        message.usage.completion_tokens = self._num_tokens
        if self._reader is not None:
            message.usage.reasoning_tokens = self._reader.num_reasoning_tokens
        message.timings.CopyFrom(timings_message(output.metrics, self._num_tokens, 1))


def _tell(message: pb.ChatResponse, events: Iterable[AssistantEvent]) -> None:
    calls: dict[int, pb.ToolCall] = {}
    for event in events:
        match event:
            case ContentDelta(text):
                message.content += text
            case ReasoningDelta(text):
                message.reasoning += text
            case CallStart(index, name, call_id):
                calls[index] = message.tool_calls.add(index=index, id=call_id or "", name=name)
            case ArgumentsDelta(index, text):
                if index not in calls:
                    calls[index] = message.tool_calls.add(index=index)
                calls[index].arguments += text


def _params(
    request: pb.ChatRequest, defaults: SamplingDefaults, kind: RequestOutputKind
) -> SamplingParams:
    message = request.sampling_params
    params = sampling_params_from_message(message, defaults).replace(output_kind=kind)
    limit = None if message.unlimited_tokens else defaults.max_tokens
    if params.n != 1:
        raise InvalidRequestError("n", params.n, "1: a chat has one answer")
    for name in ("logprobs", "prompt_logprobs"):
        if (value := getattr(params, name)) is not None:
            allowed = "not given: a chat over gRPC tells no log-probabilities"
            raise InvalidRequestError(name, value, allowed)
    return params if message.HasField("max_tokens") else params.replace(max_tokens=limit)


def _budget(request: pb.ChatRequest) -> int | None:
    is_given = request.HasField("thinking_token_budget")
    return check_thought_budget(request.thinking_token_budget if is_given else None)


def _tool_use(request: pb.ChatRequest) -> ToolUse | None:
    if request.tool_choice not in _CHOICES:
        allowed = '"auto", "none" or "required"; a function is named by tool_choice_name'
        raise InvalidRequestError("tool_choice", request.tool_choice, allowed)
    choice: Any = request.tool_choice or None
    if name := request.tool_choice_name:
        if choice is not None:
            raise InvalidRequestError("tool_choice", choice, "empty, with tool_choice_name")
        choice = {"type": "function", "function": {"name": name}}
    parallel = request.parallel_tool_calls if request.HasField("parallel_tool_calls") else None
    tools = [_tool(index, tool) for index, tool in enumerate(request.tools)]
    try:
        return read_tool_use(tools, choice, parallel)
    except InvalidRequestError as error:
        raise InvalidRequestError(_field(error.field), error.value, error.allowed) from None


def _tool(index: int, tool: pb.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "strict": tool.strict}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = _json(f"tools[{index}].parameters", tool.parameters)
    return {"type": "function", "function": function}


def _names(request: pb.ChatRequest, use: ToolUse | None) -> dict[str, Any]:
    """What the template gets besides the messages."""
    given = request.chat_template_kwargs
    if len(given) > MAX_BYTES:
        allowed = f"at most {MAX_BYTES} characters"
        raise InvalidRequestError(FIELD, f"{len(given)} characters", allowed)
    names = _json(FIELD, given) if given else {}
    if not isinstance(names, dict):
        raise InvalidRequestError(FIELD, given, "a JSON object")
    return template_names(names, use)


def _messages(request: pb.ChatRequest) -> list[dict[str, Any]]:
    """The conversation as templates and OpenAI's chats have it."""
    if not 1 <= len(request.messages) <= MAX_MESSAGES:
        given = f"{len(request.messages)} messages"
        raise InvalidRequestError("messages", given, f"1 to {MAX_MESSAGES}")
    made = []
    for each in request.messages:
        message: dict[str, Any] = {"role": each.role, "content": each.content}
        if each.reasoning:
            message["reasoning_content"] = each.reasoning
        if each.tool_calls:
            message["tool_calls"] = [
                ToolCall(call.id, call.name, call.arguments).as_openai() for call in each.tool_calls
            ]
        if each.tool_call_id:
            message["tool_call_id"] = each.tool_call_id
        made.append(message)
    return made


def _json(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequestError(field, text, "JSON") from None


def _field(name: str) -> str:
    """A field of OpenAI's chat as the message has it."""
    if name.startswith("tool_choice.function"):
        return "tool_choice_name"
    return name.replace(".function", "")
