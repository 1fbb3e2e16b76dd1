"""gRPC clients that dawdle: they are let go, or hold nobody but themselves."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from octavo.engine.sampling_params import SamplingParams
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

SETTINGS, PING, GOAWAY, ACK = 4, 6, 7, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", PREFACE[:10], b"GET / HTTP/1.1\r\n"])
def test_a_connection_that_never_says_anything_whole_is_let_go(on_stand, sent):
    async def scenario(stand):
        host, port = stand.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(sent)
        async with asyncio.timeout(20):
            while True:
                try:
                    if not await reader.read(1024):
                        break
                except ConnectionResetError:
                    break
        writer.close()
        await stand.client.load()

    on_stand(scenario, receive_timeout_s=0.3)


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """The next HTTP/2 frame: type, flags, payload."""
    head = await reader.readexactly(9)
    payload = await reader.readexactly(int.from_bytes(head[:3]))
    return head[3], head[4], payload


def frame(kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + bytes(4) + payload


def test_a_client_that_died_silently_is_pinged_and_dropped(on_stand):
    async def scenario(stand):
        host, port = stand.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(PREFACE + frame(SETTINGS) + frame(SETTINGS, ACK))
        kinds = []
        async with asyncio.timeout(30):
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
                while True:
                    kinds.append((await read_frame(reader))[0])
        assert PING in kinds
        writer.close()

    on_stand(scenario, keepalive_s=0.5)


def test_pings_of_an_idle_client_are_answered_and_keep_its_connection(on_stand):
    """gRPC's default hangs up at the third: a load balancer would lose its connections."""

    async def scenario(stand):
        host, port = stand.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(PREFACE + frame(SETTINGS) + frame(SETTINGS, ACK))
        async with asyncio.timeout(30):
            for number in range(8):
                said = number.to_bytes(8)
                writer.write(frame(PING, payload=said))
                while True:
                    kind, flags, payload = await read_frame(reader)
                    assert kind != GOAWAY, payload
                    if (kind, flags, payload) == (PING, ACK, said):
                        break
        writer.close()

    on_stand(scenario)


def test_a_client_that_reads_nothing_holds_only_itself(on_stand):
    async def scenario(stand):
        request = pb.GenerateRequest(
            prompt="x", sampling_params=pb.SamplingParams(max_tokens=1_000_000)
        )
        call = stand.channel.unary_stream("/octavo.v1.OctavoService/GenerateStream")
        deaf = call(request.SerializeToString())
        await stand.until(lambda: len(stand.engine.live) == 1)
        for _ in range(20):
            output = await stand.client.generate("y", SamplingParams(max_tokens=3))
            assert output.finished
        assert len(stand.engine.live) == 1
        deaf.cancel()
        await stand.until(lambda: not stand.engine.live)

    on_stand(scenario)
