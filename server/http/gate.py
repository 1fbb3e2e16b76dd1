"""What every HTTP request passes first: tokens, the body's size and time, and a last resort."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.engine.errors import NOT_FAILURES, OctavoError
from octavo.server.auth import TokenFile
from octavo.server.caller import CALLER
from octavo.server.http.errors import (
    INCIDENT,
    body_of,
    cut_off,
    encode,
    error_body,
    headers_of,
    incident,
)
from octavo.server.tracing import TRACE_PARENT

OPEN_PATHS = frozenset(("/", "/health", "/ready"))
"""Needs no token: what load balancers ask, and the status page, which holds no figures itself."""

DISCARD_BYTES = 64 * 1024 * 1024
DISCARD_S = 2.0
"""Of a refused body that are read and dropped, so that its sender comes to read the answer."""


class _RefusedError(BaseException):
    """A header or body that is too large or too slow; carries the answer.

    Not an `Exception`: the framework would take it for a body that does not parse.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Gate:
    """ASGI middleware in front of everything.

    Args:
        app: what lies behind.
        tokens: that open the server; None lets everybody in.
        max_header_bytes, max_body_bytes: largest accepted.
        receive_timeout_s: seconds in which a body must arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: TokenFile | None,
        max_header_bytes: int,
        max_body_bytes: int,
        receive_timeout_s: float,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._max_header_bytes = max_header_bytes
        self._max_body_bytes = max_body_bytes
        self._receive_timeout_s = receive_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        body = _Body(receive, self._max_body_bytes, self._receive_timeout_s)
        try:
            self._check_header(scope)
            if self._tokens is not None and scope["path"] not in OPEN_PATHS:
                CALLER.set(self._tokens.check(_header(scope, b"authorization")))
            body.declare(scope)
            TRACE_PARENT.set(_header(scope, b"traceparent"))
            await self._app(scope, body.receive, watched_send)
        except OctavoError as error:
            text = encode(body_of(error))
            await _answer(send, error.http_status, text, headers_of(error), body)
        except _RefusedError as error:
            text = encode(error_body(error.status, str(error), code=error.code))
            await _answer(send, error.status, text, {"connection": "close"}, body)
        except asyncio.CancelledError:
            # The server stops, and the time to finish is over.
            if not started:
                end = cut_off()
                text = encode(body_of(end))
                await _answer(send, end.http_status, text, headers_of(end), body)
        except NOT_FAILURES:
            raise
        except BaseException:
            if INCIDENT not in scope:
                text = incident()
                if not started:
                    await _answer(send, 500, text, {}, body)

    def _check_header(self, scope: Scope) -> None:
        size = sum([len(key) + len(value) + 4 for key, value in scope["headers"]])
        if size + len(scope.get("raw_path") or b"") + len(scope["query_string"]) > (
            self._max_header_bytes
        ):
            raise _RefusedError(
                431, f"the header has more than {self._max_header_bytes} bytes", "header_too_large"
            )


class _Body:
    """Counts and times a body while it is received."""

    def __init__(self, receive: Receive, max_bytes: int, timeout_s: float) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._num_bytes = 0
        self._end_s: float | None = None
        self._done = False

    def declare(self, scope: Scope) -> None:
        """Takes note of the length that the header declares."""
        header = _header(scope, b"content-length")
        if header is None:
            self._done = _header(scope, b"transfer-encoding") is None
        elif header.isdecimal() and int(header) > self._max_bytes:
            raise self._too_large(header)

    async def receive(self) -> Message:
        """The next message, for the application."""
        if self._done:
            return await self._receive()
        loop = asyncio.get_running_loop()
        if self._end_s is None:
            self._end_s = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._end_s):
                message = await self._next()
        except TimeoutError:
            self._done = True  # there is nothing to wait for any more
            raise _RefusedError(
                408, f"the body did not arrive within {self._timeout_s:g} s", "request_timeout"
            ) from None
        if self._num_bytes > self._max_bytes:
            raise self._too_large(f"more than {self._max_bytes}")
        return message

    async def discard(self) -> None:
        """Reads what is left of it, within limits."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_S):
                while not self._done and self._num_bytes < DISCARD_BYTES:
                    await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        self._done = not message.get("more_body", False)
        return message

    def _too_large(self, size: str) -> _RefusedError:
        return _RefusedError(
            413,
            f"the body has {size} bytes: at most {self._max_bytes} are accepted",
            "request_too_large",
        )


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


async def _answer(
    send: Send, status: int, content: bytes, headers: dict[str, str], body: _Body
) -> None:
    """Answers before the application could; what is left of the request's body is dropped first.

    A connection closed with bytes unread is reset, and the answer is lost with it.
    """
    given = {"content-type": "application/json", "content-length": str(len(content)), **headers}
    raw = [(key.encode(), value.encode()) for key, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    await body.discard()
    await send({"type": "http.response.body", "body": b""})
