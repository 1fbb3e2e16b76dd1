"""POST /v1/embeddings and /pooling."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.input.input_processor import Prompt
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.outputs import vector_of
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.pooling.pooler import Pooler
from octavo.server.beside_loop import beside_loop
from octavo.server.front import Front
from octavo.server.http.bodies import JsonRoute
from octavo.server.http.errors import encode_long
from octavo.server.http.protocol import EmbeddingRequest, PoolingRequest
from octavo.server.http.sampling import check_model, options_of, prompts_of, request_id_of
from octavo.server.http.streaming import CLIENT_CLOSED, unless_gone
from octavo.server.pooled_requests import pool_all, usage_of

MAX_TEXTS = 2048
"""Of one body: as many as OpenAI takes."""


def embedding_routes(front: Front) -> APIRouter:
    """The routes that give back vectors."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        """Vectors of texts, behind the model's own prompt if it has one."""
        return await respond(request, body, "embedding", "embedding")

    @router.post("/pooling")
    async def pooling(request: Request, body: PoolingRequest) -> Response:
        """Pooled hidden states, as vLLM names them."""
        return await respond(request, body, "pooling", "data")

    async def respond(request: Request, body: EmbeddingRequest, kind: str, name: str) -> Response:
        """Vectors in objects of a kind, under a name."""
        engine = front.ready_engine()
        check_model(body.model, engine)
        pooler = engine.pooler_or_refuse()
        texts, params = await beside_loop(read_texts, body, pooler)
        request_id = request_id_of(request.headers, "embd")
        options, names = options_of(body, request.headers), ["input"] * len(texts)
        outputs = await unless_gone(
            request, pool_all(front, texts, params, request_id, options, names)
        )
        if outputs is None:
            return Response(status_code=CLIENT_CLOSED)
        is_base64, model = body.encoding_format == "base64", engine.model_name
        # Thousands of numbers: other answers must not wait for them to be written.
        content = await asyncio.to_thread(
            lambda: encode_long(embeddings_answer(outputs, model, kind, name, is_base64=is_base64))
        )
        headers = {"x-request-id": request_id}
        return Response(content, headers=headers, media_type="application/json")

    return router


def read_texts(body: EmbeddingRequest, pooler: Pooler) -> tuple[list[Prompt], PoolingParams]:
    """What a body wants embedded, behind the model's own prompt, and how.

    Raises:
        InvalidRequestError: it can never be served; names the field.
    """
    given = prompts_of(body.input, "input", MAX_TEXTS)
    params = PoolingParams(
        pooling=body.pooling,  # type: ignore[arg-type]  # checked there
        normalize=body.normalize,
        dimensions=body.dimensions,
    )
    pooler.resolve(params)
    return [pooler.prompted(each, body.prompt_name) for each in given], params


def embeddings_answer(
    outputs: Sequence[RequestOutput],
    model: str,
    kind: str = "embedding",
    name: str = "embedding",
    *,
    is_base64: bool = False,
) -> dict[str, Any]:
    """OpenAI's object of the vectors: objects of a kind that hold them under a name."""
    data = []
    for index, output in enumerate(outputs):
        vector = vector_of(output).astype("<f4")
        embedding = base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()
        data.append({"object": kind, "index": index, name: embedding})
    return {"object": "list", "data": data, "model": model, "usage": usage_of(outputs)}
