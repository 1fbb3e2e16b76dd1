"""An event loop that hears of few sockets at a time.

asyncio handles everything that is ready before it looks again. When a client closes 1,500
connections at once, that is one turn of 75 ms, during which no stream moves. The kernel reports
sockets in turns: those that a full report left out come first in the next one.
"""

from __future__ import annotations

import asyncio
import select
import selectors

MOST_EVENTS = 32
"""Sockets that one turn of the loop handles."""

if hasattr(select, "epoll"):

    class _Epoll:
        """An epoll object whose reports are short."""

        def __init__(self) -> None:
            epoll = select.epoll()
            self.register, self.unregister = epoll.register, epoll.unregister
            self.modify, self.close, self.fileno = epoll.modify, epoll.close, epoll.fileno
            self._poll = epoll.poll

        def poll(self, timeout: float, maxevents: int) -> list[tuple[int, int]]:
            """As `select.epoll.poll`."""
            return self._poll(timeout, min(maxevents, MOST_EVENTS))

    class _ShortReports(selectors.EpollSelector):
        _selector_cls = _Epoll


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop for a server; where the system has no epoll, asyncio's own."""
    if hasattr(select, "epoll"):
        return asyncio.SelectorEventLoop(_ShortReports())
    return asyncio.new_event_loop()
