"""Asks the application as a client would, within the process: one path for both."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message

from octavo.engine.errors import NOT_FAILURES
from octavo.server.http.errors import encode, error_body


@dataclass(frozen=True, slots=True)
class Answer:
    """What the application answered."""

    status: int
    headers: dict[str, str]
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Answer:
    """Posts JSON. Cancelling the call is the client's leaving.

    Args:
        app: the application behind the gate; the current `Caller` asks.
        path: of the route.
    """
    headers = [
        (b"host", b"batch"),
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    started: list[Message] = []
    parts: list[bytes] = []

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await asyncio.get_running_loop().create_future()  # a batch never leaves of itself
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.append(message)
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except NOT_FAILURES:
        raise
    except BaseException:  # the application has logged it, and answered with its number
        if not started:
            return Answer(500, {}, encode(error_body(500, "internal error", code="internal")))
    [start] = started
    names = {key.decode("latin-1"): value.decode("latin-1") for key, value in start["headers"]}
    return Answer(start["status"], names, b"".join(parts))
