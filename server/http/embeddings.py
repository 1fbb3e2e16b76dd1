"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from octavo.engine.errors import InvalidRequestError
from octavo.engine.input.input_processor import POOLED, Prompt
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.outputs import vector_of
from octavo.engine.pooling.params import PoolingParams
from octavo.server.front import Front
from octavo.server.http.bodies import JsonRoute
from octavo.server.http.errors import encode_long
from octavo.server.http.protocol import EmbeddingRequest
from octavo.server.http.sampling import check_model, options_of, prompts_of, request_id_of
from octavo.server.http.streaming import CLIENT_CLOSED, unless_gone

MAX_TEXTS = 2048
"""Of one body: as many as OpenAI takes."""
TEXTS_AT_ONCE = 32
"""Of one body that are in the engine together: others' requests find their places."""


def embedding_routes(front: Front) -> APIRouter:
    """The routes that give back vectors."""
    router = APIRouter(route_class=JsonRoute)

    @router.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        """Vectors of texts."""
        engine = front.ready_engine()
        check_model(body.model, engine)
        pooler = engine.pooler_or_refuse()
        given = prompts_of(body.input, "input", MAX_TEXTS)
        params = PoolingParams(
            pooling=body.pooling,  # type: ignore[arg-type]  # checked there
            normalize=body.normalize,
            dimensions=body.dimensions,
        )
        pooler.resolve(params)
        texts = [pooler.prompted(each, body.prompt_name) for each in given]
        request_id = request_id_of(request.headers, "embd")
        options = options_of(body, request.headers)
        outputs = await unless_gone(
            request, pool_all(front, texts, params, request_id, options, name="input")
        )
        if outputs is None:
            return Response(status_code=CLIENT_CLOSED)
        is_base64 = body.encoding_format == "base64"
        # Thousands of numbers: other answers must not wait for them to be written.
        content = await asyncio.to_thread(
            lambda: encode_long(_answer(outputs, engine.model_name, is_base64=is_base64))
        )
        headers = {"x-request-id": request_id}
        return Response(content, headers=headers, media_type="application/json")

    return router


async def pool_all(
    front: Front,
    texts: Sequence[Prompt],
    params: PoolingParams,
    request_id: str,
    options: Mapping[str, Any],
    *,
    name: str,
) -> list[RequestOutput]:
    """The outputs of pooled requests, a few of which are in the engine together.

    Args:
        options: keyword arguments of `Front.generate`.
        name: of the field that holds the texts, for errors.

    Raises: as `Front.generate`; the first error ends all of them.
    """
    places = asyncio.Semaphore(TEXTS_AT_ONCE)

    async def pool(text: Prompt) -> RequestOutput:
        async with places:
            stream = front.generate(text, POOLED, request_id, pooling=params, **options)
            async with contextlib.aclosing(stream) as outputs:
                return await anext(outputs)

    tasks = [asyncio.ensure_future(pool(text)) for text in texts]
    try:
        return await asyncio.gather(*tasks)
    except InvalidRequestError as error:
        if error.field in ("prompt", "prompt_token_ids"):
            raise InvalidRequestError(name, error.value, error.allowed) from None
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _answer(outputs: Sequence[RequestOutput], model: str, *, is_base64: bool) -> dict[str, Any]:
    data = []
    for index, output in enumerate(outputs):
        vector = vector_of(output).astype("<f4")
        embedding = base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
