"""What the server tells of itself: models, tokens, health, load, metrics."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.errors import InvalidRequestError
from octavo.engine.request import Priority
from octavo.engine.text.assistant.tool_request import read_tool_use
from octavo.server.beside_loop import beside_loop
from octavo.server.front import STARTING, Front
from octavo.server.http.bodies import JsonRoute
from octavo.server.http.errors import encode_long, error_body, json_response
from octavo.server.http.metrics import CONTENT_TYPE, Exposition
from octavo.server.http.protocol import DetokenizeRequest, TokenizeRequest
from octavo.server.http.sampling import chat_names, check_model
from octavo.server.server_info import octavo_version, server_info
from octavo.server.texts import detokenize_ids, tokenize_text


def information_routes(front: Front) -> APIRouter:
    """The routes that generate nothing."""
    router = APIRouter(route_class=JsonRoute)
    exposition = Exposition(front)
    created = int(time.time())

    def model() -> dict[str, Any]:
        engine = front.ready_engine()
        return {
            "id": engine.model_name,
            "object": "model",
            "created": created,
            "owned_by": "octavo",
            "max_model_len": engine.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """The served model."""
        return json_response({"object": "list", "data": [model()]})

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """The served model, if it has this name."""
        check_model(name, front.ready_engine())
        return json_response(model())

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text, or of a conversation as the model reads it."""
        engine = front.ready_engine()
        check_model(body.model, engine)
        if (body.prompt is None) == (body.messages is None):
            given = "neither" if body.prompt is None else "both"
            raise InvalidRequestError("prompt", given, "exactly one of prompt and messages")

        if body.messages is not None:
            use = await beside_loop(read_tool_use, body.tools)
            names = chat_names(body, use)
            text = await front.render_chat(body.messages, names)
            special = bool(body.add_special_tokens)
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
        tokens = await tokenize_text(engine, "prompt", text, add_special_tokens=special)
        content = {"count": len(tokens), "max_model_len": engine.max_model_len, "tokens": tokens}
        data = await asyncio.to_thread(encode_long, content)
        return Response(data, media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids."""
        engine = front.ready_engine()
        check_model(body.model, engine)
        text = await detokenize_ids(
            engine, "tokens", body.tokens, skip_special_tokens=body.skip_special_tokens
        )
        return json_response({"prompt": text})

    @router.get("/health")
    async def health() -> Response:
        """Liveness: 200 unless the engine broke or is stuck, or a port is dead; true while loading
        and draining."""
        failing = front.failing
        if failing is None:
            return json_response({"status": "alive"})
        return json_response(error_body(503, failing, code="engine_dead"), 503)

    @router.get("/ready")
    async def ready() -> Response:
        """Readiness: 200 while new requests are served."""
        if front.is_ready:
            return json_response({"status": "ready"})
        return json_response(error_body(503, _why_not_ready(front), code="not_ready"), 503)

    @router.get("/ping")
    @router.post("/ping")
    async def ping(request: Request) -> Response:
        """As `/health`, under the name that hosting platforms ask for."""
        await request.body()  # what is left unread ends the connection
        return await health()

    @router.get("/version")
    async def version() -> Response:
        """The server's version."""
        return json_response({"version": octavo_version()})

    @router.get("/server_info")
    async def about() -> Response:
        """Versions, devices and what the engine was started with."""
        facts = server_info(
            front.ready_engine(),
            uptime_s=time.monotonic() - front.started_s,
            draining=front.draining,
        )
        names = facts.DESCRIPTOR.fields_by_name
        return json_response({name: _plain(getattr(facts, name)) for name in names})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """The special tokens and the chat template, for clients that tokenize by `/tokenize`."""
        tokenizer = front.ready_engine().tokenizer
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_ids
        return json_response(
            {
                "tokenizer_class": "Octavo",
                "bos_token": None if bos is None else tokenizer.id_to_token(bos),
                "eos_token": tokenizer.id_to_token(eos[0]) if eos else None,
                "chat_template": tokenizer.chat_template,
            }
        )

    @router.get("/v1/load")
    async def load(request: Request) -> Response:
        """Queues and pages, and when a request of the asked size and class would first speak.

        Query: `num_prompt_tokens` (1), `priority` (normal).
        """
        size = request.query_params.get("num_prompt_tokens", "1")
        if not size.isdecimal() or not 1 <= len(size) <= 9 or int(size) < 1:
            raise InvalidRequestError("num_prompt_tokens", size, "an integer from 1 to 999999999")
        priority = Priority.parse(_number_or_name(request.query_params.get("priority")))
        found = front.ready_engine().load(int(size), priority)
        figures = dataclasses.asdict(found)
        figures["wrong_refusals_ratio"] = found.wrong_refusals_ratio
        figures["wrong_refusals_interval"] = found.wrong_refusals_interval
        figures["queues"] = {
            Priority(key).name.lower(): queue for key, queue in figures["queues"].items()
        }
        # JSON has no infinity: with nothing promised, there is no least pace.
        figures["standing"] = {
            name: figure if figure != math.inf else None
            for name, figure in found.standing._asdict().items()
        }
        return json_response(
            figures | {"num_inflight": front.num_inflight, "draining": front.draining}
        )

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' text format."""
        return Response(exposition.render(), headers={"content-type": CONTENT_TYPE})

    return router


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _why_not_ready(front: Front) -> str:
    if front.engine is None:
        return STARTING
    if front.draining:
        return "the server is draining"
    return front.failing or "the engine is not ready"


def _number_or_name(value: str | None) -> str | int | None:
    return int(value) if value is not None and value.isdecimal() and len(value) < 4 else value
