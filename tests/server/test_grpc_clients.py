"""gRPC clients that dawdle: they are let go, or hold nobody but themselves."""

from __future__ import annotations

import asyncio

import pytest

from octavo.engine.sampling_params import SamplingParams
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb

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
