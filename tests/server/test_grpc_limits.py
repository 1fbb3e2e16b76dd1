"""gRPC calls that stay open, come too many at once, or end while they are answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.engine.errors import InvalidRequestError, OverloadedError, UnauthenticatedError
from octavo.server import grpc_first_message, grpc_health
from octavo.server.grpc_health import HealthService
from octavo.server.proto.kserve.v2 import inference_pb2
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.request_stats import RequestStats
from octavo.server.status import error_of

SERVICE = "/octavo.v1.OctavoService"
INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TOKEN = "token-0123456789"
MOST_CONNECTIONS = 16


def health(stand: Any) -> health_pb2_grpc.HealthStub:
    return health_pb2_grpc.HealthStub(stand.channel)


async def serves(stand: Any) -> None:
    answer = await health(stand).Check(health_pb2.HealthCheckRequest())
    assert answer.status == SERVING
    assert (await stand.client.generate("x")).finished


async def refusal(call: Any) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of(caught.value)


def test_watches_have_a_limit_of_their_own(on_stand, monkeypatch):
    monkeypatch.setattr(grpc_health, "MOST_WATCHES", 20)

    async def scenario(stand):
        watches = [health(stand).Watch(health_pb2.HealthCheckRequest()) for _ in range(20)]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        error = await refusal(health(stand).Watch(health_pb2.HealthCheckRequest()).read())
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s > 0
        await serves(stand)
        watches[0].cancel()
        async with asyncio.timeout(20):
            while True:
                watch = health(stand).Watch(health_pb2.HealthCheckRequest())
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert (await watch.read()).status == SERVING
                    break
        stand.server._set_serving(False)
        assert (await watches[1].read()).status == NOT_SERVING

    on_stand(scenario, max_concurrent_requests=1)


class Deaf:
    """The context of a call whose client reads nothing."""

    def __init__(self) -> None:
        self.written: list[int] = []

    async def write(self, message: Any) -> None:
        self.written.append(message.status)
        await asyncio.Event().wait()


class Reading(Deaf):
    async def write(self, message: Any) -> None:
        self.written.append(message.status)


async def test_a_watcher_that_does_not_read_holds_up_nobody():
    service = HealthService(RequestStats())
    service.set("", SERVING)
    deaf, reading = Deaf(), Reading()
    request = health_pb2.HealthCheckRequest()
    tasks = [asyncio.create_task(service.Watch(request, context)) for context in (deaf, reading)]
    while not (deaf.written and reading.written):
        await asyncio.sleep(0)
    for status in (NOT_SERVING, NOT_SERVING, SERVING):
        service.set("", status)
        for _ in range(5):
            await asyncio.sleep(0)
    assert (deaf.written, reading.written) == ([SERVING], [SERVING, NOT_SERVING, SERVING])
    service.enter_graceful_shutdown()
    service.set("", SERVING)
    assert (await service.Check(request, None)).status == NOT_SERVING
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_calls_above_the_limit_are_refused_with_the_time_to_try_again(on_stand, monkeypatch):
    monkeypatch.setattr("octavo.server.serve.SPARE_CALLS", 0)

    async def scenario(stand):
        stand.engine.gate.clear()
        streams = [stand.client.stream("x") for _ in range(3)]
        for stream in streams:
            await anext(stream)
        load = stand.channel.unary_unary(f"{SERVICE}/GetLoad")
        error = await refusal(load(b""))
        assert isinstance(error, OverloadedError)
        assert error.retry_after_s > 0
        answer = await health(stand).Check(health_pb2.HealthCheckRequest())
        assert answer.status == SERVING
        stand.engine.gate.set()
        for stream in streams:
            async for _ in stream:
                pass
        await load(b"")
        await serves(stand)

    on_stand(scenario, max_concurrent_requests=3)


def test_calls_without_a_message_take_no_place_and_the_oldest_goes(on_stand, monkeypatch):
    monkeypatch.setattr("octavo.server.serve.SPARE_CALLS", 0)
    monkeypatch.setattr(grpc_first_message, "MOST_WAITING", 10)

    async def scenario(stand):
        method = stand.channel.stream_unary(f"{SERVICE}/Generate")
        oldest = method()
        await asyncio.sleep(0.2)
        calls = [method() for _ in range(30)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await oldest
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await serves(stand)
        for call in calls:
            call.cancel()

    on_stand(scenario, max_concurrent_requests=2)


def test_idle_streams_of_messages_leave_room_for_calls(on_stand, monkeypatch):
    monkeypatch.setattr("octavo.server.serve.SPARE_CALLS", 0)

    async def scenario(stand):
        method = stand.channel.stream_stream(INFER)
        open_ones = [method() for _ in range(2)]
        for call in open_ones:
            await call.write(inference_pb2.ModelInferRequest(id="1").SerializeToString())
            await call.read()
        error = await refusal(method().read())
        assert isinstance(error, OverloadedError)
        await serves(stand)
        for call in open_ones:
            call.cancel()

    on_stand(scenario, max_concurrent_requests=2)


def test_two_authorizations_are_refused(on_stand, tmp_path):
    (tmp_path / "tokens").write_text(TOKEN)

    async def scenario(stand):
        good, bad = (("authorization", f"Bearer {token}") for token in (TOKEN, "x" * 16))
        method = stand.channel.unary_unary(f"{SERVICE}/GetLoad")
        await method(b"", metadata=[good])
        assert isinstance(await refusal(method(b"", metadata=[bad])), UnauthenticatedError)
        for pair in ([good, bad], [bad, good], [good, good]):
            error = await refusal(method(b"", metadata=pair))
            assert isinstance(error, InvalidRequestError)
            assert error.field == "authorization"

    on_stand(scenario, token_file=str(tmp_path / "tokens"))


def test_clients_that_leave_at_any_moment_leave_nothing_in_the_log(on_stand, caplog):
    rng = random.Random(3)

    async def one(stand: Any, number: int) -> None:
        request = pb.GenerateRequest(
            prompt="x", sampling_params=pb.SamplingParams(max_tokens=rng.randint(1, 40))
        )
        kind = number % 4
        if kind == 0:
            call = stand.channel.unary_stream(f"{SERVICE}/GenerateStream")(
                request.SerializeToString()
            )
        elif kind == 1:
            call = stand.channel.unary_unary(f"{SERVICE}/Generate")(request.SerializeToString())
        elif kind == 2:
            call = stand.channel.stream_unary(f"{SERVICE}/Generate")()
        else:
            call = stand.channel.stream_stream(INFER)()
            infer = inference_pb2.ModelInferRequest(model_name="counting", id=str(number))
            tensor = infer.inputs.add(name="text_input", datatype="BYTES", shape=[1])
            tensor.contents.bytes_contents.append(b"x")
            infer.parameters["stream"].bool_param = True
            infer.parameters["max_tokens"].int64_param = 30
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await call.write(infer.SerializeToString())
        await asyncio.sleep(rng.random() * 0.02)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await (call.read() if kind in (0, 3) else call)

    async def scenario(stand):
        numbers = iter(range(1200))

        async def work() -> None:
            for number in numbers:
                await one(stand, number)

        await asyncio.gather(*(work() for _ in range(32)))
        await stand.until(lambda: not stand.engine.live)
        await serves(stand)

    with caplog.at_level(logging.WARNING):
        on_stand(scenario)
    assert not caplog.records, caplog.text[:4000]


def test_connections_above_the_limit_are_closed_and_those_that_are_there_are_served(on_stand):
    async def scenario(stand):
        await serves(stand)  # over a connection of its own
        host, port = stand.address.rsplit(":", 1)
        async with contextlib.AsyncExitStack() as stack:
            first_bytes, writers = [], []
            for _ in range(2 * MOST_CONNECTIONS):
                reader, writer = await asyncio.open_connection(host, int(port))
                writers.append(writer)  # one that nobody holds is closed
                stack.callback(writer.transport.abort)
                with contextlib.suppress(ConnectionError):
                    first_bytes.append(await reader.read(1))
            held = sum(map(bool, first_bytes))  # the server's side of HTTP/2 begins at once
            assert 0 < held < MOST_CONNECTIONS
            await serves(stand)
        async with asyncio.timeout(20):
            while True:  # what they took is free again
                reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    if await reader.read(1):
                        break
                finally:
                    writer.transport.abort()

    on_stand(scenario, max_connections=MOST_CONNECTIONS)
