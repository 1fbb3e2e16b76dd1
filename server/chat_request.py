"""A client's side of a chat over gRPC: from OpenAI's shapes to a message, and the answer back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.errors import InvalidRequestError
from octavo.engine.output.outputs import CompletionOutput, RequestOutput
from octavo.engine.request import Priority
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.assistant.message import AssistantMessage, ToolCall
from octavo.server.output_message import FINISH_NAMES, read_timings
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.sampling_message import sampling_params_to_message


def chat_request(
    messages: Sequence[Mapping[str, Any]],
    sampling_params: SamplingParams | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    thinking_token_budget: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    request_id: str | None = None,
    model: str | None = None,
    priority: Priority | str | int | None = None,
    tenant: str = "",
    cache_salt: str = "",
    ttft_target_ms: float | None = None,
    tpot_target_ms: float | None = None,
    e2e_target_ms: float | None = None,
) -> pb.ChatRequest:
    """The message of one chat.

    Args:
        messages: as OpenAI's chats have them, with contents of text.
        sampling_params: None takes the defaults, and as many tokens as the context leaves.
        tools, tool_choice, parallel_tool_calls: as for `LLM.chat`.
        thinking_token_budget: most tokens of a thought; None for no limit.
        chat_template_kwargs: further names for the template.

    The others are those of `generate_request`.

    Raises:
        InvalidRequestError: a value that no message can carry.
    """
    name = ""
    if isinstance(tool_choice, Mapping):
        name = str((tool_choice.get("function") or {}).get("name") or "")
        if not name:
            allowed = '"none", "auto", "required", or {"function": {"name": string}}'
            raise InvalidRequestError("tool_choice", tool_choice, allowed)
        tool_choice = None
    if sampling_params is None:
        sampling_params = SamplingParams(max_tokens=None)
    try:
        return pb.ChatRequest(
            request_id=request_id,
            model=model,
            messages=[_message(each) for each in messages],
            tools=[_tool(each) for each in tools or ()],
            tool_choice=tool_choice or "",
            tool_choice_name=name,
            parallel_tool_calls=parallel_tool_calls,
            thinking_token_budget=thinking_token_budget,
            chat_template_kwargs=json.dumps(dict(chat_template_kwargs or {})),
            sampling_params=sampling_params_to_message(sampling_params),
            priority=pb.Priority.Name(Priority.parse(priority) + 1),
            tenant=tenant,
            cache_salt=cache_salt,
            ttft_target_ms=ttft_target_ms,
            tpot_target_ms=tpot_target_ms,
            e2e_target_ms=e2e_target_ms,
        )
    except InvalidRequestError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InvalidRequestError("request", str(error), "values that fit the message") from error


def read_chat_response(message: pb.ChatResponse) -> RequestOutput:
    """The output; times are in seconds since the server accepted the request."""
    turn = AssistantMessage(
        content=message.content or None,
        reasoning=message.reasoning or None,
        tool_calls=tuple(
            ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls
        ),
        num_reasoning_tokens=message.usage.reasoning_tokens,
    )
    completion = CompletionOutput(
        index=0,
        text=message.content,
        token_ids=[],
        finish_reason=FINISH_NAMES.get(message.finish_reason),
        message=turn,
    )
    return RequestOutput(
        request_id=message.request_id,
        prompt=None,
        prompt_token_ids=[],
        prompt_logprobs=None,
        outputs=[completion],
        finished=message.finished,
        metrics=read_timings(message.timings),
        num_cached_tokens=message.usage.cached_tokens,
    )


def _message(given: Mapping[str, Any]) -> pb.ChatMessage:
    return pb.ChatMessage(
        role=given["role"],
        content=given.get("content") or "",
        reasoning=given.get("reasoning_content") or given.get("reasoning") or "",
        tool_calls=[
            pb.ToolCall(index=index, id=call["id"], **_function(call["function"]))
            for index, call in enumerate(given.get("tool_calls") or ())
        ],
        tool_call_id=given.get("tool_call_id") or "",
    )


def _function(given: Mapping[str, Any]) -> dict[str, str]:
    arguments = given.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"name": given["name"], "arguments": text}


def _tool(given: Mapping[str, Any]) -> pb.Tool:
    function = given["function"]
    parameters = function.get("parameters")
    return pb.Tool(
        name=function["name"],
        description=function.get("description") or "",
        parameters="" if parameters is None else json.dumps(parameters),
        strict=bool(function.get("strict")),
    )
