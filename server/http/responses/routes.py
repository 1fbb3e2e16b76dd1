"""POST /v1/responses and /v1/responses/input_tokens, and what is kept of responses."""

from __future__ import annotations

import asyncio
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.errors import InvalidRequestError
from octavo.server.beside_loop import beside_loop
from octavo.server.front import Front
from octavo.server.http.bodies import JsonRoute
from octavo.server.http.chat_turns import chat_text, prepare_chat
from octavo.server.http.errors import encode_long, json_response
from octavo.server.http.listing import Limit, Order, page_of
from octavo.server.http.responses.answer import ResponsesAnswer
from octavo.server.http.responses.history import History
from octavo.server.http.responses.items import as_stored
from octavo.server.http.responses.protocol import InputTokensRequest, ResponsesRequest
from octavo.server.http.responses.translation import check_included, translate
from octavo.server.http.sampling import check_model
from octavo.server.http.turn_blocks import respond
from octavo.server.texts import tokenize_text


def responses_routes(front: Front, history: History) -> APIRouter:
    """OpenAI's Responses over the same engine as chats.

    Args:
        history: conversations that are kept.
    """
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/responses")
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Answers a conversation, as items."""
        before = await history.before(body.previous_response_id)
        chat_body, names = await beside_loop(translate, body, before)
        with names.named():
            chat = await prepare_chat(front, chat_body, request.headers, "resp")
            name, keep = uuid.uuid4().hex, None
            if history.is_on and body.store is not False:
                # An input of megabytes: other answers must not wait for it to be written.
                inputs = await asyncio.to_thread(lambda: encode_long(as_stored(name, body.input)))
                keep = history.keeper(body.previous_response_id, inputs)
            answer = ResponsesAnswer(name, body, chat, keep)
            return await respond(front, request, chat, answer, {})

    @router.post("/v1/responses/input_tokens")
    async def input_tokens(body: InputTokensRequest) -> Response:
        """Counts the tokens of a prompt."""
        engine = front.ready_engine()
        before = await history.before(body.previous_response_id)
        chat_body, names = await beside_loop(translate, body, before)
        with names.named():
            check_model(chat_body.model, engine)
            text, _ = await chat_text(front, chat_body)
            tokens = await tokenize_text(engine, "input", text, add_special_tokens=False)
        return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})

    @router.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str, stream: bool = False) -> Response:
        """A response that is kept."""
        if stream:
            allowed = "false, or not given: a response that is kept is told at once"
            raise InvalidRequestError("stream", stream, allowed)
        check_included(_included(request))
        return Response(history.response(response_id), media_type="application/json")

    @router.delete("/v1/responses/{response_id}")
    async def delete(response_id: str) -> Response:
        """Forgets a response."""
        history.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        request: Request,
        response_id: str,
        limit: Limit = 20,
        order: Order = "desc",
        after: str | None = None,
        before: str | None = None,
    ) -> Response:
        """What a kept response was made of."""
        check_included(_included(request))
        items = await history.input_items(response_id)
        page = page_of(items, limit=limit, order=order, after=after, before=before)
        return json_response(page)

    return router


def _included(request: Request) -> list[str]:
    """What a query asks to include, as OpenAI's clients write lists, too."""
    query = request.query_params
    return query.getlist("include") + query.getlist("include[]")
