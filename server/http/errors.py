"""Errors in OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`, and as answers.

`error_shapes` puts them into the shape of another API.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import math
import uuid
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.errors import (
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    OverloadedError,
    shorten,
)
from octavo.server.answered_errors import forget_frames
from octavo.server.http.error_shapes import shaped
from octavo.server.http.known_fields import MAX_MEANT_CHARS
from octavo.server.http.protocol import refusal
from octavo.server.status import reason_of

_TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}
_CODES = {"unknown_model": "model_not_found", "unauthenticated": "invalid_api_key"}
_HTTP_CODES = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
}
PIECE_ITEMS = 256
"""Of a list that are written at once."""
INCIDENT = "octavo.incident"
"""Of a request's scope: its incident is logged already."""
REFUSAL = "octavo.refusal"
"""Of a request's scope: the kind of the error that answers it, for the metrics."""

_log = logging.getLogger(__name__)


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The object that says what went wrong."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: OctavoError) -> dict[str, Any]:
    """The object of a typed error."""
    reason = reason_of(type(error)).lower()
    param = error.field if isinstance(error, InvalidRequestError) else None
    return error_body(error.http_status, str(error), param=param, code=_CODES.get(reason, reason))


def body_of_http(error: HTTPException) -> dict[str, Any]:
    """The object of an error that HTTP alone knows: no such path, no such method."""
    code = _HTTP_CODES.get(error.status_code, "http_error")
    return error_body(error.status_code, error.detail, code=code)


def headers_of(error: OctavoError) -> dict[str, str]:
    """Headers that go with a typed error."""
    if isinstance(error, OverloadedError):
        # The header knows whole seconds alone; `retry-after-ms` is OpenAI's own finer one.
        return {
            "retry-after": str(max(1, math.ceil(error.retry_after_s))),
            "retry-after-ms": str(max(1, round(error.retry_after_s * 1e3))),
        }
    if error.http_status == HTTPStatus.UNAUTHORIZED:
        return {"www-authenticate": "Bearer"}
    if error.http_status == HTTPStatus.SERVICE_UNAVAILABLE:
        return {"retry-after": "1"}
    return {}


def cut_off() -> OctavoError:
    """Of an answer that did not end before the server had to."""
    return EngineDeadError("the server stopped before the answer was complete: ask another one")


def encode(content: object) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which no UTF-8 can hold, becomes a question mark."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def encode_long(content: object) -> bytes:
    """As `encode`, in pieces: for a thread, which gives way to others only between two of them."""
    return b"".join(_pieces(content))


def _pieces(content: object) -> Iterator[bytes]:
    if isinstance(content, dict):
        opening = b"{"
        for name, value in content.items():
            yield opening + encode(name) + b":"
            yield from _pieces(value)
            opening = b","
        yield b"}" if content else b"{}"
    elif isinstance(content, list) and any(isinstance(item, dict) for item in content):
        opening = b"["
        for item in content:
            yield opening
            yield from _pieces(item) if len(content) < PIECE_ITEMS else (encode(item),)
            opening = b","
        yield b"]"
    elif isinstance(content, list):
        parts = (content[at : at + PIECE_ITEMS] for at in range(0, len(content), PIECE_ITEMS))
        yield b"[" + b",".join(encode(part)[1:-1] for part in parts) + b"]"
    else:
        yield encode(content)


def json_response(
    content: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response of JSON."""
    return Response(encode(content), status, headers, media_type="application/json")


def incident() -> dict[str, Any]:
    """Logs the exception being handled under a number; the object that tells of that number
    alone."""
    number = uuid.uuid4().hex[:12]
    _log.exception("incident %s", number)
    message = f"internal error, incident {number} in the log"
    return error_body(500, message, code="internal")


async def on_bug(request: Request, error: Exception) -> Response:
    """For `add_exception_handler`: what nobody raised on purpose."""
    request.scope[INCIDENT] = True
    request.scope[REFUSAL] = "internal"
    return json_response(shaped(request.url.path, 500, incident()), 500)


async def on_octavo_error(request: Request, error: Exception) -> Response:
    """For `add_exception_handler`."""
    assert isinstance(error, OctavoError)
    request.scope[REFUSAL] = reason_of(type(error)).lower()
    forget_frames(error)
    status = error.http_status
    return json_response(
        shaped(request.url.path, status, body_of(error)), status, headers_of(error)
    )


async def on_invalid_body(request: Request, error: Exception) -> Response:
    """For `add_exception_handler`: names the first field that is wrong, as every error does."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    forget_frames(error)
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        wrong = InvalidRequestError("content-encoding", coding, "identity: send the body as it is")
    elif isinstance(first["input"], bytes):  # FastAPI reads no other kind
        kind = request.headers.get("content-type")
        wrong = InvalidRequestError("content-type", kind, "application/json")
    elif first["type"] == "json_invalid":
        wrong = InvalidRequestError("body", "this", f"JSON ({first['ctx']['error']})")
    else:
        wrong = refusal(first["type"], first["loc"][1:], first["input"], first["msg"])
    return await on_octavo_error(request, wrong)


async def _misdirected(request: Request, error: HTTPException) -> HTTPException:
    """The error with what was asked for, and the path that was likely meant."""
    path = request.url.path
    shown = shorten(path, MAX_MEANT_CHARS)
    detail = f"{error.detail}: {request.method} {shown} is not served"
    if error.status_code == HTTPStatus.NOT_FOUND and len(path) <= MAX_MEANT_CHARS:
        # Made once, in a quarter of a second, which nobody's stream is to wait for.
        api = request.app.openapi_schema or await asyncio.to_thread(request.app.openapi)
        near = difflib.get_close_matches(path, api["paths"], 1, 0.7)
        detail += f"; did you mean {near[0]}?" if near else ""
    return HTTPException(error.status_code, detail)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """For `add_exception_handler`: no such path, no such method, a body that cannot be read."""
    assert isinstance(error, HTTPException)
    request.scope[REFUSAL] = _HTTP_CODES.get(error.status_code, "http_error")
    forget_frames(error)
    status = error.status_code
    told = error if status not in _HTTP_CODES else await _misdirected(request, error)
    content = shaped(request.url.path, status, body_of_http(told))
    return json_response(content, status, dict(error.headers or {}))
