"""Refused calls and lost connections are freed at once, not by Python's collector."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import types
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import octavo.server
from octavo.engine.errors import InvalidRequestError, OctavoError
from octavo.server.answered_errors import forget_frames
from octavo.server.http.connection import Connection

SERVER = str(Path(octavo.server.__file__).parent)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
TOKEN = "token-0123456789"
COUNT = 10


def of_the_server(item: Any) -> bool:
    """Whether an object is the server's; the clients of these tests leave garbage of their own."""
    if isinstance(item, types.FrameType):
        return item.f_code.co_filename.startswith(SERVER)
    return isinstance(item, (Connection, OctavoError, grpc.aio.AbortError))


async def freed(stand: Any) -> None:
    """Waits until no connection is held, and the last call is over."""
    await stand.until(lambda: not stand.server._http._server.server_state.connections)
    await asyncio.sleep(0.2)


def sends(data: bytes) -> Callable[[Any], Awaitable[None]]:
    async def scenario(stand: Any) -> None:
        host, port = stand.http.removeprefix("http://").split(":")
        with contextlib.ExitStack() as clients:
            for _ in range(COUNT):
                client = clients.enter_context(socket.create_connection((host, int(port))))
                client.sendall(data)
            await asyncio.sleep(0.05)
        await freed(stand)

    return scenario


def calls(method: str, token: str | None = TOKEN) -> Callable[[Any], Awaitable[None]]:
    async def scenario(stand: Any) -> None:
        metadata = [] if token is None else [("authorization", f"Bearer {token}")]
        unary = stand.channel.stream_unary(method)
        sent = [unary(metadata=metadata) for _ in range(COUNT)]
        await asyncio.sleep(0.02)
        for call in sent:
            await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError):
                await call
        await freed(stand)

    return scenario


AUTHORIZED = HEAD + f"authorization: Bearer {TOKEN}\r\n".encode()
SCENARIOS = {
    "a silent connection": sends(b""),
    "half a header": sends(HEAD),
    "half a body": sends(AUTHORIZED + b"content-length: 9\r\n\r\n{"),
    "half a body without a token": sends(HEAD + b"content-length: 9\r\n\r\n{"),
    "a body that is no JSON": sends(AUTHORIZED + b"content-length: 3\r\n\r\n{{{"),
    "a body that is no request": sends(AUTHORIZED + b"content-length: 2\r\n\r\n{}"),
    "two framings": sends(HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n"),
    "no such path": sends(AUTHORIZED.replace(b"completions", b"x") + b"content-length: 0\r\n\r\n"),
    "health": sends(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"),
    "a call without a message": calls("/octavo.v1.OctavoService/Generate"),
    "a call without a token": calls("/octavo.v1.OctavoService/Generate", None),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_is_left_to_the_collector(on_stand, tmp_path, name):
    (tmp_path / "tokens").write_text(TOKEN)
    found: list[Any] = []

    async def scenario(stand: Any) -> None:
        await SCENARIOS[name](stand)  # once before: what is imported and cached meanwhile stays
        gc.collect()
        gc.freeze()  # nobody looks at what the process has loaded: a second each time
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await SCENARIOS[name](stand)
            gc.collect()
            found.extend(str(type(item)) for item in gc.garbage if of_the_server(item))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.unfreeze()
            gc.enable()

    on_stand(scenario, http_port=0, token_file=str(tmp_path / "tokens"))
    assert found == []


def test_frames_of_all_that_an_error_came_from_are_forgotten():
    def fails() -> None:
        try:
            raise KeyError("x")
        except KeyError as cause:
            raise InvalidRequestError("x", 1, "2") from cause

    with pytest.raises(InvalidRequestError) as caught:
        fails()
    error = caught.value
    assert error.__cause__ is not None
    error.__cause__.__context__ = error  # a ring ends
    forget_frames(error)
    assert error.__traceback__ is None
    assert error.__cause__.__traceback__ is None
