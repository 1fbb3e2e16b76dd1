"""SIGTERM once drains, twice cuts off: the whole `serve`, over an engine that holds its answers."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from octavo.client import AsyncOctavoClient, SamplingParams
from octavo.engine.errors import InvalidConfigError, OctavoError
from octavo.server.serve import Ending, OctavoServer, serve
from octavo.server.serve_config import ServeConfig


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("again", [False, True])
def test_the_first_signal_drains_and_the_second_cuts_off(counting_engine, number, again):
    async def main() -> None:
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        config = ServeConfig(grpc_port=0, drain_timeout_s=50.0)
        serving = asyncio.create_task(
            serve(
                lambda: counting_engine,
                config,
                announce=lambda addresses, engine: ready.set_result(addresses.grpc),
            )
        )
        counting_engine.gate.clear()
        async with AsyncOctavoClient(await ready, retry=None) as client:
            stream = client.stream("x", SamplingParams(max_tokens=3))
            outputs = [await anext(stream)]
            os.kill(os.getpid(), number)
            while not await refuses(client):
                await asyncio.sleep(0.01)
            assert not serving.done()
            if again:
                os.kill(os.getpid(), number)
                with pytest.raises(OctavoError):
                    await anext(stream)
            else:
                counting_engine.gate.set()
                outputs += [output async for output in stream]
                assert [output.outputs[0].token_ids for output in outputs] == [[1], [2], [3]]
            assert await serving is Ending.WHOLE
        assert not counting_engine.live

    before = signal.getsignal(number)
    asyncio.run(asyncio.wait_for(main(), 40))
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_process_that_does_not_serve_yet(monkeypatch, number):
    async def bind(self: OctavoServer) -> None:
        raise InvalidConfigError("a handler", signal.getsignal(number), "the system's own")

    monkeypatch.setattr(OctavoServer, "bind", bind)
    with pytest.raises(InvalidConfigError) as caught:
        asyncio.run(serve(lambda: None, ServeConfig(), announce=lambda *_: None))
    assert caught.value.value is signal.SIG_DFL


async def refuses(client: AsyncOctavoClient) -> bool:
    try:
        await client.generate("y", SamplingParams(max_tokens=1))
    except OctavoError as error:
        return "draining" in str(error)
    return False
