"""What every HTTP request passes first: tokens, the body's size and time, and a last resort."""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.engine.errors import OctavoError
from octavo.server.auth import TokenFile
from octavo.server.http.errors import body_of, body_of_http, encode, headers_of, incident

OPEN_PATHS = frozenset(("/health", "/ready"))
"""What load balancers ask for without a token."""

_CLOSE = {"connection": "close"}
"""What was not read of a body would be taken for the next request."""


class Gate:
    """ASGI middleware in front of everything.

    Args:
        app: what lies behind.
        tokens: that open the server; None lets everybody in.
        max_body_bytes: largest body accepted.
        receive_timeout_s: seconds in which a body must arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: TokenFile | None,
        max_body_bytes: int,
        receive_timeout_s: float,
    ) -> None:
        self._app = app
        self._tokens = tokens
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

        try:
            if self._tokens is not None and scope["path"] not in OPEN_PATHS:
                self._tokens.check(_header(scope, b"authorization"))
            body = _Body(
                receive, _length(scope, self._max_body_bytes), self._max_body_bytes,
                self._receive_timeout_s,
            )  # fmt: skip
            await self._app(scope, body.receive, watched_send)
        except OctavoError as error:
            await _answer(send, error.http_status, encode(body_of(error)), headers_of(error))
        except HTTPException as error:
            await _answer(
                send, error.status_code, encode(body_of_http(error)), dict(error.headers or {})
            )
        except Exception:
            text = incident()
            if not started:
                await _answer(send, 500, text, {})


class _Body:
    """Counts and times a body while it is received."""

    def __init__(
        self, receive: Receive, num_left: int | None, max_bytes: int, timeout_s: float
    ) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._num_bytes = 0
        self._end_s: float | None = None
        self._done = num_left == 0

    async def receive(self) -> Message:
        if self._done:
            return await self._receive()
        loop = asyncio.get_running_loop()
        if self._end_s is None:
            self._end_s = loop.time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._end_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(
                408, f"the body did not arrive within {self._timeout_s:g} s", _CLOSE
            ) from None
        if message["type"] != "http.request":
            self._done = True
            return message
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise _too_large(f"more than {self._max_bytes}", self._max_bytes)
        self._done = not message.get("more_body", False)
        return message


def _length(scope: Scope, most: int) -> int | None:
    """The declared length of the body; None if it is sent in chunks."""
    header = _header(scope, b"content-length")
    if header is None:
        return None if _header(scope, b"transfer-encoding") else 0
    length = int(header) if header.isdecimal() else 0
    if length > most:
        raise _too_large(str(length), most)
    return length


def _too_large(size: str, most: int) -> HTTPException:
    return HTTPException(413, f"the body has {size} bytes: at most {most} are accepted", _CLOSE)


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


async def _answer(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    given = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    raw = [(key.encode(), value.encode()) for key, value in given.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
