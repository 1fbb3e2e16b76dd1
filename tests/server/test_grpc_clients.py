"""gRPC clients that dawdle: they are let go, or hold nobody but themselves."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from octavo.engine.sampling_params import SamplingParams
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

HEADERS, SETTINGS, PING, GOAWAY = 1, 4, 6, 7
ACK, END_HEADERS = 1, 4
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


def frame(kind: int, flags: int = 0, payload: bytes = b"", stream: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


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


def headers(path: bytes) -> bytes:
    """A call's HTTP/2 header, every field spelled out."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path)]
    fields += [(b":authority", b"x"), (b"te", b"trailers"), (b"content-type", b"application/grpc")]
    sized = [bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in fields]
    return b"".join(b"\0" + field for field in sized)


@pytest.mark.parametrize(
    ("service", "method"),
    [
        ("octavo.v1.OctavoService", "Generate"),
        ("octavo.v1.OctavoService", "GenerateStream"),
        ("grpc.health.v1.Health", "Check"),
    ],
)
def test_a_call_whose_message_never_comes_is_ended(on_stand, service, method):
    async def scenario(stand):
        status = await answered(stand, f"/{service}/{method}".encode())
        assert status == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert (await stand.client.generate("x", SamplingParams(max_tokens=2))).finished

    on_stand(scenario, receive_timeout_s=0.3)


def test_without_a_token_a_call_is_refused_before_its_message(on_stand, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a-good-token\n")

    async def scenario(stand):
        for method in (b"Generate", b"GenerateStream"):
            status = await answered(stand, b"/octavo.v1.OctavoService/" + method)
            assert status == grpc.StatusCode.UNAUTHENTICATED.value[0]

    on_stand(scenario, receive_timeout_s=1000.0, token_file=str(tokens))


def test_a_health_check_that_cannot_be_read_is_the_clients_fault(on_stand):
    async def scenario(stand):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stand.channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    on_stand(scenario)


async def answered(stand, path: bytes) -> int:
    """The status of a call that sends its header alone."""
    host, port = stand.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame(SETTINGS) + frame(SETTINGS, ACK))
    writer.write(frame(HEADERS, END_HEADERS, headers(path), stream=1))
    try:
        async with asyncio.timeout(30):
            while True:
                kind, _, payload = await read_frame(reader)
                if kind == HEADERS and b"grpc-status" in payload:
                    after = payload.partition(b"grpc-status")[2]
                    return int(after[1 : 1 + after[0]])
    finally:
        writer.close()


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
