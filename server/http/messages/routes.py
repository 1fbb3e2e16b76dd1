"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.server.beside_loop import beside_loop
from octavo.server.front import Front
from octavo.server.http.bodies import JsonRoute
from octavo.server.http.chat_turns import chat_text, prepare_chat
from octavo.server.http.error_shapes import MESSAGES_PATH
from octavo.server.http.errors import json_response
from octavo.server.http.messages.answer import MessagesAnswer
from octavo.server.http.messages.protocol import CountTokensRequest, MessagesRequest
from octavo.server.http.messages.translation import translate
from octavo.server.http.sampling import check_model
from octavo.server.http.turn_blocks import respond
from octavo.server.texts import tokenize_text


def messages_routes(front: Front) -> APIRouter:
    """Anthropic's Messages over the same engine as chats."""
    router = APIRouter(route_class=JsonRoute)

    @router.post(MESSAGES_PATH)
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """Answers a conversation, in Anthropic's form."""
        chat_body, names = await beside_loop(translate, body)
        with names.named():
            chat = await prepare_chat(front, chat_body, request.headers, "msg")
            answer = MessagesAnswer(
                f"msg_{uuid.uuid4().hex}", chat,
                tells_reasoning=chat_body.include_reasoning is not False,
            )  # fmt: skip
            headers = {"request-id": chat.request_id}
            return await respond(front, request, chat, answer, headers)

    @router.post(f"{MESSAGES_PATH}/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Counts the tokens of a prompt."""
        engine = front.ready_engine()
        chat_body, names = await beside_loop(translate, body)
        with names.named():
            check_model(chat_body.model, engine)
            text, _ = await chat_text(front, chat_body)
            tokens = await tokenize_text(engine, "messages", text, add_special_tokens=False)
        return json_response({"input_tokens": len(tokens)})

    return router
