"""The application: routes, errors in one shape, and the gate in front."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from octavo.engine.errors import OctavoError
from octavo.server.auth import TokenFile
from octavo.server.front import Front
from octavo.server.http.batches.routes import FILES_PATH, batch_routes
from octavo.server.http.batches.service import BatchService
from octavo.server.http.embeddings import embedding_routes
from octavo.server.http.errors import on_bug, on_http_exception, on_invalid_body, on_octavo_error
from octavo.server.http.gate import Gate
from octavo.server.http.generation import generation_routes
from octavo.server.http.information import information_routes
from octavo.server.http.messages.routes import messages_routes
from octavo.server.http.pages import page_routes
from octavo.server.http.responses.history import History
from octavo.server.http.responses.routes import responses_routes
from octavo.server.http.responses.store import ResponseStore
from octavo.server.http.schedule import schedule_routes
from octavo.server.http.scoring import scoring_routes
from octavo.server.serve_config import SPARE_CALLS, ServeConfig
from octavo.server.server_info import octavo_version

FORM_BYTES = 65_536
"""Of an upload, beside its file."""


def make_app(
    config: ServeConfig,
    front: Front,
    tokens: TokenFile | None,
    batches: BatchService | None = None,
) -> ASGIApp:
    """The ASGI application.

    Args:
        config: limits of bodies.
        front: the engine's door.
        tokens: that open the server; None lets everybody in.
        batches: files and batches, which it starts; None does not offer them.
    """
    app = FastAPI(
        title="Octavo", version=octavo_version(), docs_url=None, redoc_url=None,
        description="Language models behind OpenAI's HTTP API.",
    )  # fmt: skip
    app.add_exception_handler(Exception, on_bug)
    app.add_exception_handler(OctavoError, on_octavo_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_exception)
    trusts = config.trust_request_chat_template
    app.include_router(generation_routes(front, trust_request_chat_template=trusts))
    app.include_router(messages_routes(front))
    store = ResponseStore(
        max_bytes=config.responses_store_bytes,
        max_entries=config.responses_store_entries,
        max_age_s=config.responses_store_age_s,
    )
    app.include_router(responses_routes(front, History(store, config.max_message_bytes)))
    app.include_router(batch_routes(batches))
    app.include_router(embedding_routes(front))
    app.include_router(scoring_routes(front))
    app.include_router(information_routes(front))
    app.include_router(schedule_routes(front))
    app.include_router(page_routes())
    if batches is not None:
        batches.start(app)
    gate = Gate(
        app,
        tokens=tokens,
        stats=front.stats,
        max_header_bytes=config.max_header_bytes,
        max_body_bytes=config.max_message_bytes,
        uploads={} if batches is None else {FILES_PATH: batches.max_file_bytes + FORM_BYTES},
        max_calls=config.max_concurrent_requests + SPARE_CALLS,
        receive_timeout_s=config.receive_timeout_s,
    )
    cross_origin = config.cross_origin()
    # In front of the gate: a browser asks for leave without a token, and reads refusals, too.
    return gate if cross_origin is None else CORSMiddleware(gate, **cross_origin)
