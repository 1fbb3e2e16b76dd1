"""POST /v1/score, /v1/rerank and /classify, and the other names that clients know them by."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response

from octavo.engine.errors import InvalidRequestError, OctavoError
from octavo.engine.input.input_processor import Prompt
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.pooling.outputs import vector_of
from octavo.engine.pooling.params import PoolingParams
from octavo.engine.pooling.scoring import Scoring, plan_scores
from octavo.server.front import Front
from octavo.server.http.bodies import JsonRoute
from octavo.server.http.errors import json_response, on_invalid_body, on_octavo_error
from octavo.server.http.protocol import ClassifyRequest, RerankRequest, ScoreRequest, Serving
from octavo.server.http.sampling import check_model, options_of, prompts_of, request_id_of
from octavo.server.http.streaming import CLIENT_CLOSED, unless_gone
from octavo.server.pooled_requests import pool_all, usage_of

MAX_PAIRS = 1024
"""Of one body."""


class RerankRoute(JsonRoute):
    """A route whose errors have the shapes of Cohere's and Jina's APIs beside OpenAI's: `message`
    and `detail` say the same as `error`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, which answers errors itself."""
        handle = super().get_route_handler()

        async def run(request: Request) -> Response:
            try:
                return await handle(request)
            except OctavoError as error:
                answer = await on_octavo_error(request, error)
            except RequestValidationError as error:
                answer = await on_invalid_body(request, error)
            return _in_rerank_shape(answer)

        return run


def _in_rerank_shape(answer: Response) -> Response:
    body = json.loads(bytes(answer.body))
    message = body["error"]["message"]
    headers = {
        name: value for name, value in answer.headers.items() if not name.startswith("content-")
    }
    content = {"message": message, "detail": message, **body}
    return json_response(content, answer.status_code, headers)


def scoring_routes(front: Front) -> APIRouter:
    """The routes that give back scores."""
    router = APIRouter(route_class=JsonRoute)
    reranking = APIRouter(route_class=RerankRoute)

    async def score_all(
        request: Request, body: Serving, request_id: str, scoring: Scoring
    ) -> list[RequestOutput] | None:
        options = options_of(body, request.headers)
        options["tokenization"] = scoring.tokenization(options["tokenization"])
        work = pool_all(front, scoring.texts, scoring.params, request_id, options, scoring.names)
        return await unless_gone(request, work)

    @router.post("/v1/score")
    @router.post("/score")
    async def score(request: Request, body: ScoreRequest) -> Response:
        """How well pairs of texts go together."""
        engine = front.ready_engine()
        check_model(body.model, engine)
        pooler = engine.pooler_or_refuse()
        first = prompts_of(body.text_1, "text_1", MAX_PAIRS)
        second = prompts_of(body.text_2, "text_2", MAX_PAIRS)
        scoring = plan_scores(pooler, first, second, body.instruction)
        request_id = request_id_of(request.headers, "score")
        outputs = await score_all(request, body, request_id, scoring)
        if outputs is None:
            return Response(status_code=CLIENT_CLOSED)
        data = [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(_scores(scoring, outputs))
        ]
        return _listed(request_id, engine.model_name, data, outputs)

    @reranking.post("/v1/rerank")
    @reranking.post("/v2/rerank")
    @reranking.post("/rerank")
    async def rerank(request: Request, body: RerankRequest) -> Response:
        """Documents in the order in which they answer a query, the best first."""
        engine = front.ready_engine()
        check_model(body.model, engine)
        pooler = engine.pooler_or_refuse()
        documents = _documents(body.documents)
        if not body.query:
            raise InvalidRequestError("query", body.query, "text that is not empty")
        names = ("query", "documents")
        scoring = plan_scores(pooler, [body.query], documents, body.instruction, names=names)
        request_id = request_id_of(request.headers, "rerank")
        outputs = await score_all(request, body, request_id, scoring)
        if outputs is None:
            return Response(status_code=CLIENT_CLOSED)
        scores = _scores(scoring, outputs)
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        results: list[dict[str, Any]] = []
        for index in best[: body.top_n]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": documents[index]}
            results.append(result)
        content = {
            "id": request_id,
            "model": engine.model_name,
            "results": results,
            "usage": usage_of(outputs),
        }
        return json_response(content, headers={"x-request-id": request_id})

    @router.post("/classify")
    @router.post("/v1/classify")
    async def classify(request: Request, body: ClassifyRequest) -> Response:
        """The likeliest of the classes that the model's head knows, and how likely each is."""
        engine = front.ready_engine()
        check_model(body.model, engine)
        labels = engine.pooler_or_refuse().head_or_refuse().labels
        texts = prompts_of(body.input, "input", MAX_PAIRS)
        request_id = request_id_of(request.headers, "classify")
        options, params = options_of(body, request.headers), PoolingParams(classify=True)
        work = pool_all(front, texts, params, request_id, options, ["input"] * len(texts))
        outputs = await unless_gone(request, work)
        if outputs is None:
            return Response(status_code=CLIENT_CLOSED)
        data = []
        for index, output in enumerate(outputs):
            probs = vector_of(output).tolist()
            label = labels[probs.index(max(probs))]
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return _listed(request_id, engine.model_name, data, outputs)

    router.include_router(reranking)
    return router


def _scores(scoring: Scoring, outputs: list[RequestOutput]) -> list[float]:
    vectors = [vector_of(output) for output in outputs]
    return [scoring.score(index, vectors) for index in range(len(scoring.pairs))]


def _documents(given: list[Any]) -> list[Prompt]:
    """The documents' texts.

    Raises:
        InvalidRequestError: none, too many, or one that is no text.
    """
    if not 1 <= len(given) <= MAX_PAIRS:
        raise InvalidRequestError("documents", f"{len(given)} documents", f"1 to {MAX_PAIRS}")
    texts: list[Prompt] = []
    for document in given:
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str) or not text:
            allowed = 'texts that are not empty, or objects {"text"} with one'
            raise InvalidRequestError("documents", document, allowed)
        texts.append(text)
    return texts


def _listed(
    request_id: str, model: str, data: list[dict[str, Any]], outputs: list[RequestOutput]
) -> Response:
    """As vLLM lists scores and classes."""
    content = {
        "id": request_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": usage_of(outputs),
    }
    return json_response(content, headers={"x-request-id": request_id})
