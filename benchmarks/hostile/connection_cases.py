"""Hostile clients below the level of a request: connections, framing, calls that stay open."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.hostile.case import Addresses, Case
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

HOLD_S = 1.0
MANY = 1500
OPENED_TOGETHER = 50
MOST_AT_ONCE = 5000
GENERATE = "/octavo.v1.OctavoService/Generate"
STREAM = "/octavo.v1.OctavoService/GenerateStream"
INFER = "/inference.GRPCInferenceService/ModelStreamInfer"


def _head(to: Addresses, line: str = "POST /v1/completions HTTP/1.1") -> bytes:
    fields = [line, "host: x", "content-type: application/json"]
    fields += [f"{name}: {value}" for name, value in to.headers.items()]
    return "\r\n".join(fields).encode() + b"\r\n"


@contextlib.asynccontextmanager
async def _connected(
    to: Addresses, data: bytes = b"", *, grpc: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = urlsplit(f"//{to.grpc}" if grpc else to.http)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(data)
        yield reader, writer
    finally:
        writer.transport.abort()


async def _crowd(count: int, one: Callable[[], Awaitable[None]], together: int) -> None:
    """Runs `one` so often, so many at once."""
    places = asyncio.Semaphore(together)

    async def run() -> None:
        async with places:
            await one()

    await asyncio.gather(*(run() for _ in range(count)))


def _hold(
    count: int, data: Callable[[Addresses], bytes], *, grpc: bool = False
) -> Callable[[Addresses], Awaitable[None]]:
    """Opens connections, sends the same on each, and holds all of them."""

    async def send(to: Addresses) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(count):
                with contextlib.suppress(ConnectionError):
                    await stack.enter_async_context(_connected(to, data(to), grpc=grpc))
            await asyncio.sleep(HOLD_S)

    return send


def _repeat(
    count: int, data: Callable[[Addresses], bytes], statuses: tuple[int, ...]
) -> Callable[[Addresses], Awaitable[None]]:
    """Sends the same on one connection after another, and reads the first answer of each."""

    async def send(to: Addresses) -> None:
        async def one() -> None:
            with contextlib.suppress(ConnectionError):
                async with _connected(to, data(to)) as (reader, _), asyncio.timeout(20):
                    line = await reader.readline()
                    good = not line or int(line.split()[1]) in statuses
                    assert good, line

        await _crowd(count, one, OPENED_TOGETHER)

    return send


def _one_byte_chunks(to: Addresses) -> bytes:
    return _head(to) + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 1_000_000


def _honest(to: Addresses) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 1, "priority": "low"}).encode()
    return _head(to) + b"content-length: %d\r\n\r\n" % len(body) + body


async def _honest_at_once(to: Addresses) -> None:
    """More honest requests than the server takes: each is served or asked to come again."""
    served = 0

    async def one() -> None:
        nonlocal served
        async with _connected(to, _honest(to)) as (reader, _), asyncio.timeout(50):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            status = int(head.split()[1])
            assert status in ((200, 429) if to.token is not None else (401, 429)), head
            assert status != 429 or "\r\nretry-after: " in head, head
            served += status == 200

    try:
        await _crowd(MOST_AT_ONCE, one, MOST_AT_ONCE)
    except (ConnectionError, EOFError) as error:
        raise AssertionError(f"a request without an answer: {error!r}") from error
    assert served or to.token is None, "none was served"


async def _trickle(to: Addresses) -> None:
    async def one() -> None:
        with contextlib.suppress(ConnectionError):
            async with _connected(to) as (_, writer):
                for byte in _head(to)[:60]:
                    writer.write(bytes([byte]))
                    await asyncio.sleep(0.02)

    await _crowd(300, one, 300)


def _channels(to: Addresses, count: int) -> list[grpc.aio.Channel]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    return [grpc.aio.insecure_channel(to.grpc, options=options) for _ in range(count)]


def _calls(
    count: int, begin: Callable[[grpc.aio.Channel, Addresses], object]
) -> Callable[[Addresses], Awaitable[None]]:
    """Begins calls on a few channels, holds them, and leaves."""

    async def send(to: Addresses) -> None:
        channels = _channels(to, 4)
        calls = []
        for number in range(count):
            calls.append(begin(channels[number % len(channels)], to))
            if number % OPENED_TOGETHER == 0:
                await asyncio.sleep(0.01)
        await asyncio.sleep(HOLD_S)
        for channel in channels:
            await channel.close()

    return send


def _watch(channel: grpc.aio.Channel, to: Addresses) -> object:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())


async def _watches_beside_calls(to: Addresses) -> None:
    """Paying clients call while others watch."""
    paying = [("authorization", f"Bearer {to.paying}")]
    request = pb.GenerateRequest(
        prompt="x", sampling_params=pb.SamplingParams(max_tokens=2, ignore_eos=True)
    ).SerializeToString()

    async def pay() -> None:
        end_s = time.monotonic() + HOLD_S
        [channel] = _channels(to, 1)
        try:
            while time.monotonic() < end_s:
                await channel.unary_unary(GENERATE)(request, metadata=paying, timeout=20)
        except grpc.aio.AioRpcError as error:
            raise AssertionError(
                f"a paying call ended: {error.code()} {error.details()}"
            ) from error
        finally:
            await channel.close()

    await asyncio.gather(_calls(MANY, _watch)(to), *(pay() for _ in range(4)))


def _no_message(channel: grpc.aio.Channel, to: Addresses) -> object:
    return channel.stream_unary(GENERATE)(metadata=list(to.headers.items()))


def _idle_stream(channel: grpc.aio.Channel, to: Addresses) -> object:
    return channel.stream_stream(INFER)(metadata=list(to.headers.items()))


async def _leaving(to: Addresses) -> None:
    """Calls whose client leaves at any moment."""
    rng = random.Random(5)
    [channel] = _channels(to, 1)
    request = pb.GenerateRequest(
        prompt="x", priority=pb.PRIORITY_LOW, sampling_params=pb.SamplingParams(max_tokens=20)
    ).SerializeToString()

    async def one() -> None:
        call = channel.unary_stream(STREAM)(request, metadata=list(to.headers.items()))
        await asyncio.sleep(rng.random() * 0.02)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call.read()

    await _crowd(400, one, 8)
    await channel.close()


REFUSED = (400, 401, 408, 413, 429, 431)
CASES = (
    Case(name="silent connections", send=_hold(MANY, lambda to: b"")),
    Case(name="half a header", send=_hold(MANY, lambda to: b"GET /hea"), short=False),
    Case(name="trickled headers", send=_trickle, short=False),
    Case(
        name="half a body",
        send=_hold(500, lambda to: _head(to) + b"content-length: 900\r\n\r\n{"),
        short=False,
    ),
    Case(name="one-byte chunks", send=_repeat(4, _one_byte_chunks, REFUSED)),
    Case(
        name="refused large bodies",
        send=_repeat(
            30,
            lambda to: _head(to) + b"content-length: %d\r\n\r\n" % 10**9 + b" " * (1 << 20),
            REFUSED,
        ),
        short=False,
    ),
    Case(
        name="many header fields",
        send=_repeat(200, lambda to: _head(to) + b"a:\r\n" * 15_000 + b"\r\n", REFUSED),
        short=False,
    ),
    Case(
        name="pipelined requests",
        send=_repeat(
            50, lambda to: (_head(to, "GET /v1/models HTTP/1.1") + b"\r\n") * 2000, (200, *REFUSED)
        ),
        short=False,
    ),
    Case(
        name="two framings",
        send=_repeat(
            300,
            lambda to: _head(to) + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
            REFUSED,
        ),
    ),
    Case(name="a burst of requests", send=_repeat(1000, _honest, (200, *REFUSED)), short=False),
    Case(name="5,000 requests at once", send=_honest_at_once, short=False),
    Case(name="silent gRPC connections", send=_hold(MANY, lambda to: b"", grpc=True), short=False),
    Case(
        name="half a gRPC preface",
        send=_hold(MANY, lambda to: b"PRI * HTTP/2.0\r\n", grpc=True),
        short=False,
    ),
    Case(name="health watches", send=_calls(MANY, _watch)),
    Case(name="health watches beside calls", send=_watches_beside_calls, short=False),
    Case(name="calls without a message", send=_calls(MANY, _no_message), short=False),
    Case(name="idle streams of messages", send=_calls(MANY, _idle_stream), short=False),
    Case(name="clients that leave", send=_leaving),
)
