"""A server elsewhere that is lost: which requests it may have died of."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue
from typing import Any

import pytest

from octavo.engine.input.input_processor import Submission
from octavo.engine.replicas import messages
from octavo.engine.request import Request
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.server import grpc_service
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.route import remote_replica
from octavo.server.route.backend import Backend
from octavo.server.route.remote_replica import RemoteReplica
from tests.server.conftest import Stand

TIMEOUT_S = 0.5
PARAMS = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA)


class Wire:
    """Carries bytes between a front and a server, until it is frozen or cut."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.target = ""

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.target = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        self._flows.clear()

    def thaw(self) -> None:
        self._flows.set()

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, there = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [back, there]
        for source, sink in ((near, there), (far, back)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._flows.wait()
                sink.write(data)


REQUEST = Request(
    request_id="it", prompt_token_ids=[1], sampling_params=PARAMS, seed=1,
    eos_token_ids=(), max_tokens=3, arrival_s=0.0,
)  # fmt: skip
SUBMISSION = Submission(request_id="it", prompt=None, params=PARAMS, sequences=(REQUEST,))


def generate_nothing(stand: Stand) -> asyncio.Event:
    """Has the server's engine answer nobody; set once it is asked."""
    asked, generate = asyncio.Event(), stand.engine.generate

    async def wait_for_ever(*args: Any, **rest: Any) -> AsyncIterator[Any]:
        asked.set()
        await asyncio.Event().wait()
        async for output in generate(*args, **rest):
            yield output

    stand.engine.generate = wait_for_ever  # type: ignore[method-assign]
    return asked


async def replica_over(
    stand: Stand, wire: Wire, events: SimpleQueue[Any], timeout_s: float
) -> RemoteReplica:
    """The server, through a wire, ready."""
    replica = RemoteReplica(
        0, Backend(target=wire.target), asyncio.get_running_loop(), events,
        lambda *_: object(),  # type: ignore[arg-type, return-value]
        timeout_s=timeout_s, now_s=time.monotonic,
    )  # fmt: skip
    replica.open()
    await stand.until(lambda: replica.ready is not None)
    events.get_nowait()
    return replica


@pytest.mark.parametrize("is_cut", [True, False], ids=["dies", "falls silent"])
@pytest.mark.parametrize("is_taken", [True, False], ids=["with it", "before it has it"])
def test_a_request_is_blamed_for_the_death_of_a_server_that_had_it_alone(
    on_stand: Callable[..., None], monkeypatch: pytest.MonkeyPatch, is_taken: bool, is_cut: bool
) -> None:
    monkeypatch.setattr(grpc_service, "model_info", lambda _: pb.GetModelInfoResponse())

    async def scenario(stand: Stand) -> None:
        events, asked = SimpleQueue[Any](), generate_nothing(stand)
        async with Wire(stand.address) as wire:
            replica = await replica_over(stand, wire, events, TIMEOUT_S)
            if not is_taken:
                wire.freeze()
            replica.send(messages.Submit(SUBMISSION))
            if is_taken:
                await stand.until(lambda: any(call.is_taken for call in replica._calls.values()))
                assert asked.is_set()
            else:
                await stand.until(lambda: "it" in replica._calls)
            if is_cut:
                wire.cut()
            else:
                wire.freeze()
            await stand.until(lambda: not events.empty())
            returned = events.get_nowait().message
            assert isinstance(returned, messages.Returned)
            assert (returned.request_id, returned.has_died) == ("it", is_taken)
            await replica._end()

    on_stand(scenario)


def test_a_pause_of_the_front_itself_is_no_silence_of_a_server(
    on_stand: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_service, "model_info", lambda _: pb.GetModelInfoResponse())
    call_s, again_s, timeout_s = 0.5, 0.1, 2.0
    for name, value in (("CALL_S", call_s), ("AGAIN_S", again_s), ("LOOK_S", call_s + again_s)):
        monkeypatch.setattr(remote_replica, name, value)
    monkeypatch.setattr(remote_replica, "POLL_S", 0.05)

    async def scenario(stand: Stand) -> None:
        events = SimpleQueue[Any]()
        generate_nothing(stand)
        async with Wire(stand.address) as wire:
            replica = await replica_over(stand, wire, events, timeout_s)
            replica.send(messages.Submit(SUBMISSION))
            await stand.until(lambda: any(call.is_taken for call in replica._calls.values()))
            wire.freeze()
            await asyncio.sleep(0.2)  # a look is under way
            time.sleep(1.5 * timeout_s)
            await stand.until(lambda: replica.is_quiet)  # that look has failed
            assert replica.ready is not None
            wire.thaw()
            await stand.until(lambda: not replica.is_quiet)
            assert events.empty()
            assert "it" in replica._calls
            await replica._end()

    on_stand(scenario)


def test_what_comes_in_one_turn_is_told_at_once_and_before_any_end(
    on_stand: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_service, "model_info", lambda _: pb.GetModelInfoResponse())

    async def scenario(stand: Stand) -> None:
        events = SimpleQueue[Any]()
        async with Wire(stand.address) as wire:
            replica = await replica_over(stand, wire, events, TIMEOUT_S)
            outputs: list[Any] = [object() for _ in range(3)]
            replica._say(outputs[0], 1)
            replica._say(outputs[1], 1)
            assert events.empty()
            await asyncio.sleep(0)
            assert events.get_nowait().message == messages.News(outputs[:2])
            replica._say(outputs[2], 1)
            replica._tell(messages.Returned("it", "it was moved", has_died=False), 1)
            assert events.get_nowait().message == messages.News(outputs[2:])
            assert isinstance(events.get_nowait().message, messages.Returned)
            await asyncio.sleep(0)
            assert events.empty()
            await replica._end()

    on_stand(scenario)
