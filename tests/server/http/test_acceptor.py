"""Connections are begun a few a turn of the event loop; urgent ones ahead of a full backlog."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from octavo.server.http.acceptor import MOST_ACCEPTED, MOST_BEGUN, Acceptor, Waiting


class Stand:
    """An acceptor, and clients that connected before it came.

    Attributes:
        made: transports of connections that were begun, in order, with the client's port.
    """

    def __init__(self, stack: contextlib.ExitStack, sent: list[bytes], most: int) -> None:
        self.made: dict[int, asyncio.BaseTransport] = {}
        stand = self

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                stand.made[transport.get_extra_info("peername")[1]] = transport

        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=len(sent)))
        self.clients = []
        for data in sent:
            client = stack.enter_context(socket.create_connection(listener.getsockname()))
            client.sendall(data)
            self.clients.append(client)
        self.acceptor = Acceptor(
            listener, Protocol, lambda data: data.startswith(b"urgent"), tls=None,
            open_connections=self.made, most=most, waiting=Waiting(), handshake_timeout_s=5,
        )  # fmt: skip

    async def end(self) -> None:
        self.acceptor.close()
        await self.acceptor.wait_closed()
        for transport in self.made.values():
            transport.abort()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("data", [b"", b"POST"])
async def test_a_full_backlog_is_begun_a_few_connections_a_turn(stack, data):
    count = MOST_ACCEPTED + 50
    stand = Stand(stack, [data] * count, count)
    most, before = 0, 0
    async with asyncio.timeout(20):
        while len(stand.made) < count:
            await asyncio.sleep(0)  # one turn
            most, before = max(most, len(stand.made) - before), len(stand.made)
    await stand.end()
    assert 0 < most <= MOST_BEGUN


@pytest.mark.parametrize(
    ("before", "probe"), [(b"", b"urgent"), (b"POST", b"urgent"), (b"POST", b"")]
)
async def test_a_probe_is_begun_ahead_of_a_backlog_of_requests(stack, before, probe):
    stand = Stand(stack, [before] * 100 + [probe], 1000)
    port = stand.clients[-1].getsockname()[1]
    async with asyncio.timeout(20):
        while port not in stand.made:
            await asyncio.sleep(0)
    num_before = len(stand.made) - 1
    await stand.end()
    assert num_before <= 4 * MOST_BEGUN


async def test_silent_connections_make_room_before_they_are_begun(stack):
    stand = Stand(stack, [b""] * 20 + [b"POST"], 8)
    newest = stand.clients[-1].getsockname()[1]
    async with asyncio.timeout(20):
        while newest not in stand.made:
            await asyncio.sleep(0)
    assert len(stand.made) <= 8
    await stand.end()
