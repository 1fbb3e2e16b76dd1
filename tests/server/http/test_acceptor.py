"""How many connections a turn of the event loop takes."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

from octavo.server.http.acceptor import MOST_ACCEPTED, Acceptor, Waiting


async def test_a_full_backlog_is_taken_a_few_connections_a_turn():
    count, made = 3 * MOST_ACCEPTED + 1, set()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            made.add(transport)

    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=count))
        for _ in range(count):
            stack.enter_context(socket.create_connection(listener.getsockname()))
        acceptor = Acceptor(
            listener, Protocol, tls=None, open_connections=made, most=count,
            waiting=Waiting(), handshake_timeout_s=5,
        )  # fmt: skip
        most, before = 0, 0
        async with asyncio.timeout(20):
            while len(made) < count:
                await asyncio.sleep(0)  # one turn
                most, before = max(most, len(made) - before), len(made)
        acceptor.close()
        await acceptor.wait_closed()
        for transport in made:
            transport.abort()
    assert 0 < most <= MOST_ACCEPTED
