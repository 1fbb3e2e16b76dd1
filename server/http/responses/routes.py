"""POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.front import Front
from octavo.server.http.bodies import JsonRoute
from octavo.server.http.chat_turns import chat_text, prepare_chat
from octavo.server.http.errors import json_response
from octavo.server.http.responses.answer import ResponsesAnswer
from octavo.server.http.responses.protocol import InputTokensRequest, ResponsesRequest
from octavo.server.http.responses.translation import translate
from octavo.server.http.sampling import check_model
from octavo.server.http.turn_blocks import respond
from octavo.server.texts import tokenize_text


def responses_routes(front: Front) -> APIRouter:
    """OpenAI's Responses over the same engine as chats."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses")
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Answers a conversation, as items."""
        chat_body, names = translate(body)
        with names.named():
            chat = await prepare_chat(front, chat_body, request.headers, "resp")
            answer = ResponsesAnswer(uuid.uuid4().hex, body, chat)
            return await respond(front, request, chat, answer, {})

    @router.post("/v1/responses/input_tokens")
    async def input_tokens(body: InputTokensRequest) -> Response:
        """Counts the tokens of a prompt."""
        engine = front.ready_engine()
        chat_body, names = translate(body)
        with names.named():
            check_model(chat_body.model, engine)
            text, _ = await chat_text(front, chat_body)
            tokens = await tokenize_text(engine, "input", text, add_special_tokens=False)
        return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})

    return router
