"""What every HTTP request passes first: tokens, the body's size and time, and a last resort."""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.engine.errors import NOT_FAILURES, InvalidRequestError, OctavoError
from octavo.server.auth import TokenFile, bearer_token
from octavo.server.call_limit import CallLimit
from octavo.server.caller import CALLER
from octavo.server.http.connection import EXTENSION, LANES, Connection
from octavo.server.http.error_shapes import shaped
from octavo.server.http.errors import (
    INCIDENT,
    REFUSAL,
    body_of,
    cut_off,
    encode,
    error_body,
    headers_of,
    incident,
)
from octavo.server.request_stats import RequestStats
from octavo.server.status import reason_of
from octavo.server.tracing import TRACE_PARENT

OPEN_PATHS = frozenset(("/", "/chat", "/health", "/ready", "/ping"))
"""Needs no token: what load balancers ask, and the status page, which holds no figures itself."""

MOST_ARRIVING = 64
"""Bodies of the largest size whose bytes may be held, together, before they are complete."""


class _RefusedError(BaseException):
    """A header or body that is too large, too slow or too much; carries the answer.

    Not an `Exception`: the framework would take it for a body that does not parse.
    """

    def __init__(
        self, status: int, kind: str, content: dict[str, Any], headers: dict[str, str]
    ) -> None:
        super().__init__(kind)
        self.status, self.kind, self.content, self.headers = status, kind, content, headers


def _refused(status: int, message: str, code: str) -> _RefusedError:
    content = error_body(status, message, code=code)
    return _RefusedError(status, code, content, {"connection": "close"})


def _refused_as(error: OctavoError) -> _RefusedError:
    kind = reason_of(type(error)).lower()
    return _RefusedError(error.http_status, kind, body_of(error), headers_of(error))


class Gate:
    """ASGI middleware in front of everything.

    Args:
        app: what lies behind.
        tokens: that open the server; None lets everybody in.
        stats: counts refusals.
        max_header_bytes, max_body_bytes: largest accepted.
        uploads: path -> the largest body that is accepted there, of those that go to a file.
        max_calls: requests, whole ones, that are answered at once. `LANES` are free of it.
        receive_timeout_s: seconds in which a body must arrive.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: TokenFile | None,
        stats: RequestStats,
        max_header_bytes: int,
        max_body_bytes: int,
        uploads: Mapping[str, int],
        max_calls: int,
        receive_timeout_s: float,
    ) -> None:
        self._app = app
        self._calls = CallLimit(max_calls)
        self._arriving = _Arriving(MOST_ARRIVING * max_body_bytes)
        self._tokens = tokens
        self._stats = stats
        self._max_header_bytes = max_header_bytes
        self._max_body_bytes = max_body_bytes
        self._uploads = uploads
        self._receive_timeout_s = receive_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn, which has its own, sends no body
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        limit = None if scope["path"] in LANES else self._calls
        most, pace = self._max_body_bytes, None
        if scope["method"] == "POST" and scope["path"] in self._uploads:
            most, pace = self._uploads[scope["path"]], most / self._receive_timeout_s
        body = _Body(receive, most, self._receive_timeout_s, self._arriving, limit, pace)
        try:
            self._check_header(scope)
            if self._tokens is not None and scope["path"] not in OPEN_PATHS:
                CALLER.set(self._tokens.check(_credential(scope)))
            body.declare(scope)
            TRACE_PARENT.set(_header(scope, b"traceparent"))
            await self._app(scope, body.receive, watched_send)
        except OctavoError as error:
            await _answer(scope, send, _refused_as(error))
        except _RefusedError as refused:
            await _answer(scope, send, refused)
        except asyncio.CancelledError:
            # The server stops, and the time to finish is over.
            if not started:
                await _answer(scope, send, _refused_as(cut_off()))
        except NOT_FAILURES:
            raise
        except BaseException:
            if INCIDENT not in scope:
                content = incident()
                if not started:
                    await _answer(scope, send, _RefusedError(500, "internal", content, {}))
        finally:
            body.close()
            if REFUSAL in scope and scope["path"] not in LANES:
                self._stats.refused(scope[REFUSAL])

    def _check_header(self, scope: Scope) -> None:
        size = sum([len(key) + len(value) + 4 for key, value in scope["headers"]])
        if size + len(scope.get("raw_path") or b"") + len(scope["query_string"]) > (
            self._max_header_bytes
        ):
            raise _refused(
                431, f"the header has more than {self._max_header_bytes} bytes", "header_too_large"
            )
        for name in (b"authorization", b"x-api-key"):
            if sum(key == name for key, _ in scope["headers"]) > 1:
                raise InvalidRequestError(name.decode(), "several fields", "at most one field")
        header, key = _header(scope, b"authorization"), _header(scope, b"x-api-key")
        if header is not None and key is not None and bearer_token(header) != key.strip():
            allowed = "the token of authorization, or not given: a request has one credential"
            raise InvalidRequestError("x-api-key", _Hidden(), allowed)


class _Arriving:
    """Bounds the bytes of all bodies that are not complete: the oldest one makes room.

    Args:
        max_bytes: of all of them together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._bodies: OrderedDict[_Body, int] = OrderedDict()

    def add(self, body: _Body, num_bytes: int) -> None:
        """More of a body has come."""
        self._bodies[body] = self._bodies.get(body, 0) + num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes and len(self._bodies) > 1:
            oldest = next(iter(self._bodies))
            self.remove(oldest)
            oldest.expire()

    def remove(self, body: _Body) -> None:
        """The body is complete, or nobody waits for it any more."""
        self._num_bytes -= self._bodies.pop(body, 0)


class _Body:
    """Counts and times a body while it is received, and counts its request once it is complete.

    Args:
        pace: bytes a second of a body that goes to a file: it has longer, as long as it comes so
            fast. None for all that is held in memory.
    """

    def __init__(
        self,
        receive: Receive,
        max_bytes: int,
        timeout_s: float,
        arriving: _Arriving,
        limit: CallLimit | None,
        pace: float | None,
    ) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._pace = pace
        self._arriving = arriving
        self._limit = limit
        self._num_bytes = 0
        self._end_s: float | None = None
        self._wait: asyncio.Timeout | None = None
        self._done = self._counted = False

    def declare(self, scope: Scope) -> None:
        """Takes note of the length that the header declares."""
        header = _header(scope, b"content-length")
        if header is None:
            if _header(scope, b"transfer-encoding") is None:
                self._complete()
        elif header.isdecimal() and int(header) > self._max_bytes:
            raise self._too_large(header)

    async def receive(self) -> Message:
        """The next message, for the application."""
        if self._done:
            return await self._receive()
        if self._end_s is None:
            self._end_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(self._end_s) as self._wait:
                message = await self._receive()
        except TimeoutError:
            self._done = True  # there is nothing to wait for any more
            raise _refused(
                408, f"the body did not arrive within {self._timeout_s:g} s", "request_timeout"
            ) from None
        finally:
            self._wait = None
        size = len(message.get("body", b""))
        self._num_bytes += size
        if self._num_bytes > self._max_bytes:
            raise self._too_large(f"more than {self._max_bytes}")
        if message.get("more_body", False):
            if self._pace is None:
                self._arriving.add(self, size)
            else:
                self._end_s += size / self._pace
        else:
            self._complete()
        return message

    def expire(self) -> None:
        """Waits no longer: its time is over early."""
        self._end_s = asyncio.get_running_loop().time()
        if self._wait is not None:
            self._wait.reschedule(self._end_s)

    def close(self) -> None:
        """Its request is answered."""
        self._arriving.remove(self)
        if self._counted and self._limit is not None:
            self._limit.leave()
        self._counted = False

    def _complete(self) -> None:
        self._done = True
        self._arriving.remove(self)
        if self._limit is not None and not self._counted:
            try:
                self._limit.enter()
            except OctavoError as error:
                raise _refused_as(error) from None
            self._counted = True

    def _too_large(self, size: str) -> _RefusedError:
        return _refused(
            413,
            f"the body has {size} bytes: at most {self._max_bytes} are accepted",
            "request_too_large",
        )


class _Hidden:
    """Stands for a credential where an error shows a value."""

    def __repr__(self) -> str:
        return "another token"


def _credential(scope: Scope) -> str | None:
    """The field `authorization`, or what it would be for a token in `x-api-key`."""
    header, key = _header(scope, b"authorization"), _header(scope, b"x-api-key")
    return f"Bearer {key}" if header is None and key is not None else header


def _header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value).decode("latin-1")
    return None


async def _answer(scope: Scope, send: Send, refused: _RefusedError) -> None:
    """Answers before the application could.

    If part of the request's body is still to come, the connection closes: nothing of it is parsed,
    only dropped for a while, since a connection that is closed with bytes unread is reset, and the
    answer is lost with it.
    """
    extension = scope.get("extensions", {}).get(EXTENSION, {})
    reference: weakref.ref[Connection] | None = extension.get("connection")
    connection = None if reference is None else reference()
    must_drop = connection is not None and not connection.body_arrived
    content = encode(shaped(scope["path"], refused.status, refused.content))
    given = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        **refused.headers,
        **({"connection": "close"} if must_drop else {}),
    }
    scope[REFUSAL] = refused.kind
    raw = [(key.encode(), value.encode()) for key, value in given.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": raw})
    await send({"type": "http.response.body", "body": content, "more_body": True})
    if must_drop and connection is not None:
        await connection.drop_input()
    await send({"type": "http.response.body", "body": b""})
