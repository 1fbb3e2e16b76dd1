"""What a gRPC client sends, from the engine's types and OpenAI's shapes; and its chats' answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from octavo.engine.errors import InvalidRequestError
from octavo.engine.output.outputs import CompletionOutput, Generated, RequestOutput
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.request import Priority
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.text.assistant.message import AssistantMessage, ToolCall
from octavo.models.pooling_config import Pooling
from octavo.server.embedding_message import pooling_fields
from octavo.server.output_message import FINISH_NAMES, generated_message, read_timings
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.sampling_message import sampling_params_to_message


class Served(TypedDict, total=False):
    """How any request is served.

    Attributes:
        request_id: your name for it, repeated in its outputs; need not be unique. None lets the
            server name it.
        model: the served model's name; None is any.
        priority: a class, its name or its number.
        tenant, cache_salt: identity for fairness; prefix-cache isolation.
        ttft_target_ms: wanted time to the first token, or to the vector.
    """

    request_id: str | None
    model: str | None
    priority: Priority | str | int | None
    tenant: str
    cache_salt: str
    ttft_target_ms: float | None


class Generates(Served, total=False):
    """How a request for tokens is served.

    Attributes:
        tpot_target_ms, e2e_target_ms: wanted time per token after the first, and to the last one.
    """

    tpot_target_ms: float | None
    e2e_target_ms: float | None


def generate_request(
    prompt: str | Sequence[int],
    sampling_params: SamplingParams | None = None,
    *,
    generated: Sequence[Generated] = (),
    **served: Unpack[Generates],
) -> pb.GenerateRequest:
    """The message of one generation.

    Args:
        prompt: text, or token ids.
        sampling_params: how tokens are chosen; None leaves it to the server: the model's own.
        generated: of each completion, what another server generated for the same prompt, parameters
            and seed: the stream of deltas goes on after it.
        **served: see `Generates`.

    Raises:
        InvalidRequestError: a value that no message can carry.
    """
    with _fitting():
        message = pb.GenerateRequest(
            sampling_params=_params(sampling_params),
            generated=map(generated_message, generated),
            **_fields(served),
        )
        _set_prompt(message, prompt)
    return message


def embed_request(
    prompt: str | Sequence[int],
    *,
    pooling: Pooling | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    prompt_name: str | None = None,
    **served: Unpack[Served],
) -> pb.EmbedRequest:
    """The message of one embedding.

    Args:
        prompt: text, or token ids.
        pooling: of which tokens: "last", "mean" or "cls", the first; None is the model's own.
        normalize: scale the vector to length 1; None is the model's own.
        dimensions: numbers of the vector that are kept, before it is normalized.
        prompt_name: which of the model's prompts stands before the text; None is its default.
        **served: see `Served`.

    Raises:
        InvalidRequestError: a value that is out of its range, or that no message can carry.
    """
    params = PoolingParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
    with _fitting():
        message = pb.EmbedRequest(
            prompt_name=prompt_name, **pooling_fields(params), **_fields(served)
        )
        _set_prompt(message, prompt)
    return message


def chat_request(
    messages: Sequence[Mapping[str, Any]],
    sampling_params: SamplingParams | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    thinking_token_budget: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **served: Unpack[Generates],
) -> pb.ChatRequest:
    """The message of one chat.

    Args:
        messages: as OpenAI's chats have them, with contents of text.
        sampling_params: None leaves it to the server: the model's own, and as many tokens as the
            context leaves if the model names no limit.
        tools, tool_choice, parallel_tool_calls: as for `LLM.chat`.
        thinking_token_budget: most tokens of a thought; None for no limit.
        chat_template_kwargs: further names for the template.
        **served: see `Generates`.

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
    with _fitting():
        return pb.ChatRequest(
            messages=[_message(each) for each in messages],
            tools=[_tool(each) for each in tools or ()],
            tool_choice=tool_choice or "",
            tool_choice_name=name,
            parallel_tool_calls=parallel_tool_calls,
            thinking_token_budget=thinking_token_budget,
            chat_template_kwargs=json.dumps(dict(chat_template_kwargs or {})),
            sampling_params=_params(sampling_params),
            **_fields(served),
        )


def _params(given: SamplingParams | None) -> pb.SamplingParams:
    return pb.SamplingParams() if given is None else sampling_params_to_message(given)


def _fields(served: Served) -> dict[str, Any]:
    priority = Priority.parse(served.get("priority"))
    return {**served, "priority": pb.Priority.Name(priority + 1)}


def _set_prompt(message: pb.GenerateRequest | pb.EmbedRequest, prompt: str | Sequence[int]) -> None:
    if isinstance(prompt, str):
        message.prompt = prompt
    else:
        message.prompt_token_ids.SetInParent()
        try:
            message.prompt_token_ids.ids.extend(prompt)
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(
                "prompt", prompt, "a string or a list of token ids"
            ) from error


@contextlib.contextmanager
def _fitting() -> Iterator[None]:
    """Names what no message can carry."""
    try:
        yield
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
