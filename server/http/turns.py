"""How connections share the event loop while their bytes are parsed."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

TURN_S = 0.002
"""Seconds of one turn of the event loop that parsing may take, whatever has arrived."""
MOST_STARTS = 1
"""Requests that begin in one turn: each costs its handler's time in the next one, 1 to 3 ms. A
probe of health takes about eight turns."""


class Parsing(Protocol):
    """A connection with bytes to parse."""

    def parse_slice(self) -> tuple[bool, bool]:
        """Parses a little. Returns whether there is more, and whether a request has begun."""


class Turns:
    """Gives every connection with bytes to parse one slice after another.

    Without it, as many bytes as all clients together have sent are parsed in one turn of the event
    loop, while every stream waits. Lives in the event loop.
    """

    def __init__(self) -> None:
        # The one with requests that must be answered at any time comes every second slice.
        self._queues: tuple[deque[Parsing], deque[Parsing]] = (deque(), deque())
        self._queued: set[Parsing] = set()
        self._scheduled = False

    def add(self, connection: Parsing, *, urgent: bool = False) -> None:
        """Queues a connection that has bytes to parse, once."""
        if connection in self._queued:
            return
        self._queued.add(connection)
        self._queues[not urgent].append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        end_s, starts = time.perf_counter() + TURN_S, 0
        first, second = self._queues
        while first or second:
            for queue in self._queues:
                if not queue:
                    continue
                connection = queue.popleft()
                self._queued.discard(connection)
                more, began = connection.parse_slice()
                starts += began
                if more:
                    self.add(connection)
            if starts >= MOST_STARTS or time.perf_counter() >= end_s:
                break
        if first or second:
            self._schedule()
