"""Takes HTTP connections: a few at a time, at most so many, and calmly when descriptors run out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sized

MOST_ACCEPTED = 256
"""Connections taken from the system in one turn of the event loop, a few microseconds each."""
MOST_BEGUN = 4
"""Of either kind in one turn: transport and protocol of each take a hundred times as long."""
PEEK_BYTES = 32
PAUSE_S = 0.1
"""Without accepting, when the system has no descriptor or memory for another connection."""
TIGHT_S = 60.0
"""After that, during which fewer connections are held than there were then."""
WARN_EVERY_S = 60.0
_EXHAUSTED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

_log = logging.getLogger(__name__)


class Waiting:
    """Connections that wait for their client: no request of theirs is being answered.

    They are what an idle or hostile client can pile up, so they are what makes room: the one that
    has waited longest is closed first. Ordered by when the wait began.
    """

    def __init__(self) -> None:
        self._closers: OrderedDict[Hashable, Callable[[], object]] = OrderedDict()

    def begin(self, connection: Hashable, close: Callable[[], object]) -> None:
        """The connection waits from now on; `close` ends it."""
        self._closers[connection] = close
        self._closers.move_to_end(connection)

    def end(self, connection: Hashable) -> None:
        """The connection waits no more, or is closed."""
        self._closers.pop(connection, None)

    def close_oldest(self) -> bool:
        """Closes the one that has waited longest. Returns whether there was one."""
        if not self._closers:
            return False
        self._closers.popitem(last=False)[1]()
        return True


class Acceptor:
    """Accepts on a listening socket until it is closed; stands in for asyncio's server.

    asyncio's own accepts a whole backlog in one turn of the loop, and where descriptors run out it
    logs a traceback for each place in the backlog.

    Connections are taken from the system's queue as they come, and begun a few at a time: whoever
    asks for what must be answered at any time is begun at once, ahead of thousands.

    Args:
        listener: bound and listening; closed by whoever made it.
        make_protocol: of a connection.
        is_urgent: whether a connection that begins with these bytes is begun at once.
        tls: None without TLS.
        open_connections: kept by the protocols: those that were made and are not lost.
        most: connections open at once.
        waiting: those that can make room.
        handshake_timeout_s: seconds that TLS may take to begin.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        is_urgent: Callable[[bytes], bool],
        *,
        tls: ssl.SSLContext | None,
        open_connections: Sized,
        most: int,
        waiting: Waiting,
        handshake_timeout_s: float,
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._make_protocol = make_protocol
        self._is_urgent = is_urgent
        self._tls = tls
        self._most = most
        self._waiting = waiting
        self._handshake_timeout_s = handshake_timeout_s
        self._loop = asyncio.get_running_loop()
        self._open = open_connections
        self._handshakes: set[asyncio.Task[None]] = set()
        # Taken and not begun. A probe whose bytes were not there yet is not to wait for requests.
        self._silent: deque[socket.socket] = deque()
        self._asking: deque[socket.socket] = deque()
        self._begins = False
        self._resume: asyncio.TimerHandle | None = None
        self._tight, self._tight_until_s = most, 0.0
        self._next_warning_s = -WARN_EVERY_S
        self._closed = False
        self._listen()

    def close(self) -> None:
        """Accepts no more. Connections that are open stay."""
        if self._closed:
            return
        self._closed = True
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._listener)
        for task in self._handshakes:
            task.cancel()
        for connection in (*self._silent, *self._asking):
            connection.close()
        self._silent.clear()
        self._asking.clear()

    async def wait_closed(self) -> None:
        """Returns when no handshake is in progress any more."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    @property
    def _num_open(self) -> int:
        return len(self._open) + len(self._handshakes) + len(self._silent) + len(self._asking)

    def _listen(self) -> None:
        self._resume = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MOST_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                self._pause(error)
                return
            most = self._tight if time.monotonic() < self._tight_until_s else self._most
            if self._num_open >= most:
                self._warn(f"HTTP holds {most} connections, its most: idle ones make room")
                if not self._make_room():
                    connection.close()
                    continue
            self._sort(connection)

    def _make_room(self) -> bool:
        """Closes a connection that no request has come on. Returns whether there was one."""
        if self._waiting.close_oldest():
            return True
        if self._silent:
            self._silent.popleft().close()
            return True
        return False

    def _sort(self, connection: socket.socket) -> None:
        """Begins an urgent connection, and queues any other one."""
        connection.setblocking(False)
        data = b""
        if self._tls is None:
            with contextlib.suppress(OSError):
                data = connection.recv(PEEK_BYTES, socket.MSG_PEEK)
        if self._is_urgent(data):
            self._begin(connection)
            return
        (self._asking if data else self._silent).append(connection)
        if not self._begins:
            self._begins = True
            self._loop.call_soon(self._begin_some)

    def _begin_some(self) -> None:
        for queue in (self._silent, self._asking):
            for _ in range(min(MOST_BEGUN, len(queue))):
                self._begin(queue.popleft())
        self._begins = bool(self._silent or self._asking)
        if self._begins:
            self._loop.call_soon(self._begin_some)

    def _begin(self, connection: socket.socket) -> None:
        task = self._loop.create_task(self._connect(connection))
        self._handshakes.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._handshakes.discard(task)
            if task.cancelled():  # it may not even have begun
                connection.close()

        task.add_done_callback(end)

    async def _connect(self, connection: socket.socket) -> None:
        """Makes the connection's transport and protocol, with TLS its handshake."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting.begin(task, task.cancel)
        timeout_s = None if self._tls is None else self._handshake_timeout_s
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=timeout_s
            )
        except OSError:
            connection.close()  # no TLS, or the client left: there is no one to tell
        finally:
            self._waiting.end(task)

    def _pause(self, error: OSError) -> None:
        self._warn(f"HTTP cannot accept connections ({error}): idle ones make room")
        num_open = self._num_open
        self._tight = max(1, num_open * 3 // 4)
        self._tight_until_s = time.monotonic() + TIGHT_S
        for _ in range(num_open - self._tight):
            self._make_room()
        self._loop.remove_reader(self._listener)
        self._resume = self._loop.call_later(PAUSE_S, self._listen)

    def _warn(self, text: str) -> None:
        """Logs a warning, at most one a minute: what calls for it comes thousands of times."""
        now_s = time.monotonic()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + WARN_EVERY_S
            _log.warning("%s", text)
