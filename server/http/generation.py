"""POST /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.input.input_processor import Prompt
from octavo.engine.output.outputs import RequestOutput
from octavo.server.beside_loop import beside_loop
from octavo.server.front import Front
from octavo.server.http.answers import CompletionAnswer, Usage
from octavo.server.http.bodies import JsonRoute
from octavo.server.http.chat_turns import chat_answer, prepare_chat
from octavo.server.http.errors import encode, encode_long
from octavo.server.http.protocol import ChatRequest, CompletionRequest
from octavo.server.http.sampling import (
    Ask,
    check_model,
    check_sequences,
    completion_ask,
    prompts_of,
    request_id_of,
)
from octavo.server.http.streaming import DONE, answer_streamed, answer_whole, event, merge


def generation_routes(front: Front, *, trust_request_chat_template: bool = False) -> APIRouter:
    """The routes that generate.

    Args:
        trust_request_chat_template: whether a chat may bring a template of its own.
    """
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continues a text, or several."""
        engine = front.ready_engine()
        check_model(body.model, engine)
        ask = await beside_loop(completion_ask, body, request.headers, engine.sampling_defaults)
        prompts = prompts_of(body.prompt)
        check_sequences(len(prompts), ask.params.n)
        request_id = request_id_of(request.headers, "cmpl")
        answer = CompletionAnswer(
            request_id, engine.model_name, ask.params.n, engine.tokenizer, ask.tells
        )
        return await _respond(front, request, request_id, prompts, ask, answer)

    @router.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answers a conversation."""
        chat = await prepare_chat(
            front, body, request.headers, "chatcmpl",
            trust_request_chat_template=trust_request_chat_template,
        )  # fmt: skip
        return await _respond(
            front, request, chat.request_id, [chat.prompt], chat.ask, chat_answer(body, chat)
        )

    return router


async def _respond(
    front: Front,
    request: Request,
    request_id: str,
    prompts: list[Prompt],
    ask: Ask,
    answer: CompletionAnswer,
) -> Response:
    """The answer, whole or as a stream whose first event is known."""
    headers = {"x-request-id": request_id}
    outputs = merge(
        [front.generate(prompt, ask.params, request_id, **ask.options) for prompt in prompts]
    )
    if ask.stream:
        events = _events(outputs, answer, Usage(len(prompts)), ask)
        return await answer_streamed(request, events, headers)
    return await answer_whole(request, _whole(outputs, answer), headers)


async def _whole(outputs: AsyncGenerator[Any, None], answer: CompletionAnswer) -> bytes:
    whole = []
    async with contextlib.aclosing(outputs):
        async for place, output in outputs:
            answer.check(output)
            whole.append((place, output))
    if any(output.prompt_logprobs for _, output in whole):
        # Thousands of numbers: other answers must not wait for them to be written.
        return await asyncio.to_thread(lambda: encode_long(answer.whole(whole)))
    return encode(answer.whole(whole))


async def _events(
    outputs: AsyncGenerator[Any, None], answer: CompletionAnswer, usage: Usage, ask: Ask
) -> AsyncGenerator[bytes, None]:
    def next_events(place: int, output: RequestOutput) -> bytes:
        told = usage if ask.continuous_usage else None
        found = answer.events(place, output, usage)
        return b"".join([event(answer.part(choices, told)) for choices in found])

    try:
        async for place, output in outputs:
            if ask.tells.scores_prompt is None:
                data = next_events(place, output)
            else:  # long, see `_whole`
                data = await asyncio.to_thread(next_events, place, output)
            if data:
                yield data
    finally:
        await outputs.aclose()
    if ask.include_usage:
        yield event(answer.part([], usage))
    yield DONE
