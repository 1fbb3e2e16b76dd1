"""HTTP connections whose headers must arrive in time."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def timed_protocol(header_timeout_s: float) -> type[H11Protocol]:
    """uvicorn's protocol, with a limit that it lacks.

    A client that opens a connection and sends its header byte by byte, or nothing at all, would
    hold the connection forever.

    Args:
        header_timeout_s: seconds from the first byte of a header (or from the connection's start)
            to its end.
    """

    class TimedProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._start_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._stop_timer()
            elif self._header_timer is None:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _start_timer(self) -> None:
            self._header_timer = self.loop.call_later(header_timeout_s, self._give_up)

        def _stop_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _give_up(self) -> None:
            self._header_timer = None
            if not self.transport.is_closing():
                self.transport.close()

    return TimedProtocol
