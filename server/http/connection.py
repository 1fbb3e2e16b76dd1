"""HTTP connections: uvicorn's protocol over llhttp, with the limits that it lacks.

llhttp is strict about what makes two servers disagree on where a request ends: `Content-Length`
beside `Transfer-Encoding`, obsolete folding, bare line feeds. This module adds that

- a header must arrive in time, and has limits of size and number;
- bytes are parsed in slices, a few a turn of the event loop (`turns.py`), and a body only once its
  request is wanted: whoever is refused has nothing parsed;
- a chunked body may not be mostly framing, and few requests may be pipelined;
- a refusal is answered in the API's shape, and what the client still sends is dropped unparsed;
- a connection that no request is being answered on can make room for another one (`acceptor.py`);
- a connection that is lost is freed at once: what it holds refers to it weakly, so that thousands
  do not wait for Python's collector, which would hold every thread.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.server.http.acceptor import Waiting
from octavo.server.http.errors import encode, error_body
from octavo.server.http.turns import Turns
from octavo.server.request_stats import RequestStats

EXTENSION = "octavo.connection"
"""Of a request's ASGI scope: a weak reference to its connection, which holds the scope."""
LANES = ("/health", "/ready", "/ping", "/metrics")
"""Paths that are answered although everything else is full."""
HEAD_SLICE, BODY_SLICE = 2048, 16384
"""Bytes that are parsed at once: of a header, which a refused body may follow; of a body."""
MOST_PENDING_BYTES = 65536
"""Received and not parsed; the socket is not read above that."""
MOST_HEADERS = 128
MOST_PIPELINED = 8
FREE_FRAMING_BYTES = 65536
"""Framing of a chunked body that needs no explanation; above it, at most as much as content."""
LINGER_S, LINGER_BYTES = 1.0, 64 * 1024 * 1024
"""Dropped after a refusal: a connection closed with bytes unread is reset, its answer lost."""

_URGENT = tuple(f"{method} {path}".encode() for method in ("GET", "HEAD") for path in LANES)


def is_urgent(data: bytes) -> bool:
    """Whether a request that begins so must be answered at any time."""
    return data.startswith(_URGENT)


class _RefusedError(Exception):
    """What arrives cannot be served; raised through llhttp's callbacks."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Flow(FlowControl):
    """Reading pauses where bytes are parsed, not only where they are received."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        super().__init__(transport)
        self._connection = weakref.ref(connection)

    def pause_reading(self) -> None:
        self.read_paused = True

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if (connection := self._connection()) is not None:
                connection.continue_parsing()


class Connection(HttpToolsProtocol):
    """One connection. `HttpServer` binds the class-wide arguments.

    Args:
        header_timeout_s: seconds from the first byte of a header (or the connection's start) to
            its end.
        max_header_bytes: largest header.
        turns: shares the event loop.
        waiting: connections without a request in progress.
        stats: counts refusals.
        args: uvicorn's own.
    """

    def __init__(
        self,
        *args: Any,
        header_timeout_s: float,
        max_header_bytes: int,
        turns: Turns,
        waiting: Waiting,
        stats: RequestStats,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._header_timeout_s = header_timeout_s
        self._max_header_bytes = max_header_bytes
        self._turns = turns
        self._waiting = waiting
        self._stats = stats
        self._header_timer: asyncio.TimerHandle | None = None
        self._pending = bytearray()
        self._in_header = True
        self._begun = False  # the header, that is
        self._after_upgrade = False  # the parser is told of the same message again
        self._header_bytes = self._num_headers = 0
        self._raw_body_bytes = self._body_bytes = 0
        self._is_chunked = False
        self._began = False
        self._dropped_bytes: int | None = None
        self._silence = asyncio.Event()

    # What arrives
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self)
        self._waiting.begin(self, transport.abort)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._dropped_bytes is not None:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > LINGER_BYTES:
                self._silence.set()
            return
        self._start_timer()
        urgent = self._in_header and not self._pending and is_urgent(data)
        self._pending += data
        if not self.flow.read_paused:
            self._turns.add(self, urgent=urgent)
        self._set_reading()

    def eof_received(self) -> None:
        self._silence.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._waiting.end(self)
        self._silence.set()
        self._pending.clear()
        # Of one that was reset, uvicorn leaves the timer running and the transport in a cycle.
        super().connection_lost(None)

    def continue_parsing(self) -> None:
        """Goes on with what was received while reading was paused."""
        if self._pending:
            self._turns.add(self)
        self._set_reading()

    def parse_slice(self) -> tuple[bool, bool]:
        """Parses a little of what was received. Returns whether there is more to parse now, and
        whether a request has begun."""
        if self.parser is None or self.transport.is_closing() or self._dropped_bytes is not None:
            self._pending.clear()
            return False, False
        self._began = False
        size = HEAD_SLICE if self._in_header else BODY_SLICE
        data = bytes(self._pending[:size])
        del self._pending[:size]
        was_in_header = self._in_header
        try:
            self._feed(data)
            if self._in_header and was_in_header:
                self._header_bytes += len(data)
                self._check_header_bytes()
            elif self._is_chunked:
                self._raw_body_bytes += len(data)
                self._check_framing()
        except _RefusedError as error:
            self._refuse(error)
            return False, self._began
        self._set_reading()
        return bool(self._pending) and not self.flow.read_paused, self._began

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if isinstance(error.__context__, _RefusedError):
                raise error.__context__ from None
            raise _malformed("the request line cannot be read") from error
        except httptools.HttpParserError as error:
            raise _malformed(str(error)) from error

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Serves a request that offered another protocol as if it had not, which RFC 9110 allows.

        llhttp ends there, before the body. A fresh parser is told of the same framing.
        """
        if self.scope["method"] == "CONNECT":
            raise _malformed("CONNECT is for proxies")
        framing = [
            name + b": " + value + b"\r\n"
            for name, value in self.headers
            if name in (b"content-length", b"transfer-encoding")
        ]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._after_upgrade = True
        self._feed(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._pending[:0] = rest

    # llhttp's callbacks
    def on_message_begin(self) -> None:
        if self._after_upgrade:
            return
        if len(self.pipeline) >= MOST_PIPELINED:
            raise _malformed(f"more than {MOST_PIPELINED} requests wait for their answers")
        self._begun = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._after_upgrade:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._after_upgrade:
            return
        self._num_headers += 1
        if self._num_headers > MOST_HEADERS:
            raise _RefusedError(
                431, f"the header has more than {MOST_HEADERS} fields", "header_too_large"
            )
        if self._in_header:  # fields behind a chunked body are nobody's business here
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._after_upgrade:
            self._after_upgrade = False
            return
        names = [name for name, _ in self.headers]
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise _malformed(f"HTTP/{version} is not spoken here")
        if names.count(b"host") != 1 and version == "1.1":
            raise _malformed("HTTP/1.1 wants exactly one Host field")
        if any(n == b"transfer-encoding" and v.lower() != b"chunked" for n, v in self.headers):
            raise _malformed("Transfer-Encoding other than chunked is not read")
        self._in_header = False
        self._is_chunked = b"transfer-encoding" in names
        self._raw_body_bytes = self._body_bytes = 0
        self._stop_timer()
        self.scope["extensions"] = {EXTENSION: {"connection": weakref.ref(self)}}
        if not self._is_answering:
            self._waiting.begin(self, self.transport.abort)  # now for its body
        super().on_headers_complete()
        self._began = True
        self.flow.pause_reading()  # until somebody wants that

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._has_body():
            return  # it is still to come
        self._in_header, self._begun = True, False
        self._header_bytes = self._num_headers = 0
        self._is_chunked = False
        self._waiting.end(self)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if not is_last or self.transport.is_closing():
            return
        self._waiting.begin(self, self.transport.abort)
        if not self._in_header:  # the answer did not wait for the body: nobody wants it
            self._close_after_drop()
        elif self._begun or self._pending:
            self._start_timer()

    # Refusals
    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def body_arrived(self) -> bool:
        """Whether nothing is missing of the request that is being answered."""
        return not self.pipeline and not self.cycle.more_body

    async def drop_input(self) -> None:
        """Drops what the client still sends, unparsed, until it falls silent or leaves.

        For an answer that is written already, before the connection closes.
        """
        self._dropped_bytes = 0
        self._pending.clear()
        self._set_reading()
        try:
            async with asyncio.timeout(LINGER_S):
                await self._silence.wait()
        except TimeoutError:
            pass

    def _refuse(self, error: _RefusedError) -> None:
        """Answers what cannot be parsed, and closes. An answer in progress goes before it."""
        self._stats.refused(error.code)
        self._pending.clear()
        cycle = self.cycle
        if self._is_answering:
            if self._in_header or cycle.response_started:
                cycle.keep_alive = False
                self._dropped_bytes = 0
                return
            cycle.disconnected = True
            cycle.message_event.set()
        text = encode(error_body(error.status, str(error), code=error.code))
        head = (
            f"content-type: application/json\r\ncontent-length: {len(text)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[error.status] + head.encode() + text)
        self._close_after_drop()

    def _close_after_drop(self) -> None:
        self._dropped_bytes = 0

        async def close() -> None:
            await self.drop_input()
            self.transport.close()

        task = self.loop.create_task(close())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _check_header_bytes(self) -> None:
        if self._header_bytes > self._max_header_bytes:
            raise _RefusedError(
                431, f"the header has more than {self._max_header_bytes} bytes", "header_too_large"
            )

    def _check_framing(self) -> None:
        framing = self._raw_body_bytes - self._body_bytes
        if framing > FREE_FRAMING_BYTES + self._body_bytes:
            raise _malformed(
                f"{self._body_bytes} bytes of content came in {framing} bytes of framing: larger "
                "chunks are needed"
            )

    def _has_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
            for name, value in self.headers
        )

    def _set_reading(self) -> None:
        if self.transport.is_closing():
            return
        if self._dropped_bytes is None and len(self._pending) > MOST_PENDING_BYTES:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    # The header's time
    def _start_timer(self) -> None:
        if self._in_header and self._header_timer is None and not self._is_answering:
            self._header_timer = self.loop.call_later(self._header_timeout_s, self._give_up)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _give_up(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def _malformed(what: str) -> _RefusedError:
    return _RefusedError(400, f"this is no request in HTTP/1.1: {what}", "malformed_http")
