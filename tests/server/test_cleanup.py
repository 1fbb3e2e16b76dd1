"""However a request ends, and wherever it stands then, everything it held comes back.

A real engine behind a real gRPC server. Its thread is stopped between two stages of a step as soon
as the request stands where the test wants it; then the event happens.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.engine.scheduler.forecast import Forecast
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.serve import Ending, OctavoServer
from octavo.server.serve_config import ServeConfig

SERVICE = "/octavo.v1.OctavoService/"
TARGET = "target"
NUM_ROWS = 4
STATES = ("waiting", "prefilling", "decoding", "preempted", "swapped")
EVENTS = ("cancel", "deadline", "step error", "client gone", "shutdown")


class Gate:
    """An executor that stops the engine's thread where it is told to.

    Attributes:
        wanted: whether to stop now; None never does.
        reached: set when it has stopped.
        fault: raised when it goes on, once.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.close_again()

    def close_again(self) -> None:
        self.wanted: Callable[[], bool] | None = None
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.fault: Exception | None = None

    def go_on_until(self, wanted: Callable[[], bool]) -> None:
        """Lets the thread go on, to be stopped again."""
        go_on = self.go_on
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.wanted = wanted
        go_on.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def poll_transfers(self) -> Any:
        self._pass()
        return self._inner.poll_transfers()

    def dispatch(self, plan: Any) -> Any:
        self._pass()
        return self._inner.dispatch(plan)

    def result(self, handle: Any) -> Any:
        self._pass()
        return self._inner.result(handle)

    def _pass(self) -> None:
        if self.wanted is not None and self.wanted():
            self.wanted, go_on = None, self.go_on
            self.reached.set()
            assert go_on.wait(60)
            fault, self.fault = self.fault, None
            if fault is not None:
                raise fault


@pytest.fixture(scope="module")
def built(tiny_model: Path) -> Iterator[Any]:
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    engine = Engine(
        EngineConfig(
            model=str(tiny_model), max_num_seqs=NUM_ROWS, max_num_batched_tokens=32,
            num_kv_pages=26, block_size=16, host_kv_memory_bytes=1 << 20, warm_up="coarse",
            fail_on_compile=True, enable_prefix_caching=False, scheduling_policy="fcfs",
        )
    )  # fmt: skip
    engine.executor = engine.core.executor = Gate(engine.executor)  # type: ignore[assignment]
    close, engine.close = engine.close, lambda: None  # type: ignore[method-assign]
    yield engine
    close()


def stands(engine: Any, state: str) -> bool:
    """Whether the target is in this state now; asked in the engine's thread."""
    entry = next((e for e in engine.scheduler._unapplied.live if e.request.label == TARGET), None)
    if entry is None:
        return False
    request, has_row = entry.request, entry.request.slot is not None
    was_preempted = request.metrics.num_preemptions > 0
    if state == "waiting":
        return request.metrics.first_scheduled_s is None and engine.scheduler.num_running > 0
    if state == "prefilling":
        return has_row and 0 < request.num_computed_tokens < request.num_prompt_tokens
    if state == "decoding":
        return has_row and len(request.output_token_ids) >= 2
    return not has_row and was_preempted and bool(entry.pages.host_pages) == (state == "swapped")


def message(name: str, num_prompt: int, max_tokens: int, timeout_s: float | None = None) -> bytes:
    rng = random.Random(name)
    request = pb.GenerateRequest(
        request_id=name,
        prompt_token_ids=pb.TokenIds(ids=[rng.randrange(2, 250) for _ in range(num_prompt)]),
        sampling_params=pb.SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        ),
    )
    if timeout_s is not None:
        request.timeout_s = timeout_s
    return request.SerializeToString()


def is_clean(engine: Any) -> bool:
    load, host = engine.load(), engine.scheduler._unapplied.kv.host
    return (
        not engine.has_unfinished
        and load.num_running == load.num_waiting == 0
        and load.num_free_pages == load.num_total_pages
        and host.num_owned == 0
        and len(engine.scheduler._transfers) == 0
    )


async def ask(channel: grpc.aio.Channel, call: str, raw: bytes) -> list[int] | grpc.StatusCode:
    """The tokens of an answer, or the status that it ended with."""
    token_ids: list[int] = []
    try:
        if call == "unary":
            data = await channel.unary_unary(SERVICE + "Generate")(raw)
            answer = pb.GenerateResponse.FromString(data)
            if answer.outputs[0].finish_reason == pb.FINISH_REASON_CANCELLED:
                return grpc.StatusCode.CANCELLED
            return list(answer.outputs[0].token_ids)
        async for data in channel.unary_stream(SERVICE + "GenerateStream")(raw):
            answer = pb.GenerateResponse.FromString(data)
            token_ids += answer.outputs[0].token_ids
            if answer.outputs[0].finish_reason == pb.FINISH_REASON_CANCELLED:
                return grpc.StatusCode.CANCELLED
    except grpc.aio.AioRpcError as error:
        return error.code()
    except asyncio.CancelledError:
        return grpc.StatusCode.CANCELLED
    return token_ids


class Scene:
    """A server over the engine, a target in a state, others beside it, and one event."""

    def __init__(self, engine: Any, call: str, state: str, event: str) -> None:
        self.engine, self.call, self.state, self.event = engine, call, state, event
        self.gate: Gate = engine.executor
        self.gate.close_again()

    async def play(self, monkeypatch: pytest.MonkeyPatch) -> list[int] | grpc.StatusCode:
        """What the target's client saw."""
        from octavo.engine import async_engine

        monkeypatch.setattr(async_engine, "open_engine", lambda config, progress: self.engine)
        server = OctavoServer(ServeConfig(grpc_port=0, drain_timeout_s=0.0))
        address = (await server.bind()).grpc
        await server.attach(async_engine.AsyncEngine())
        others = grpc.aio.insecure_channel(address)
        mine = grpc.aio.insecure_channel(address)
        # Four rows of up to 8 pages do not fit 25: the target, last to come, gives way.
        presses = self.state in ("waiting", "preempted", "swapped")
        num_others = NUM_ROWS if self.state == "waiting" else NUM_ROWS - 1
        size = (40, 84) if presses else (16, 48)  # tokens of the prompt, and of the answer
        # The thread stands still while requests come: nobody has ended before the last is there.
        self.gate.wanted = lambda: True
        beside = [
            asyncio.create_task(ask(others, "unary", message(f"o{n}", *size)))
            for n in range(num_others)
        ]
        streams = server.front.ready_engine()._streams
        await self.until(lambda: len(streams) == num_others and self.gate.reached.is_set())
        self.gate.go_on_until(lambda: self.engine.scheduler.num_running == num_others)
        await self.until(self.gate.reached.is_set)
        raw = message(TARGET, 70, 50, 1000.0 if self.event == "deadline" else None)
        target = asyncio.create_task(ask(mine, self.call, raw))
        await self.until(lambda: bool(streams.labelled(TARGET, "")))
        self.gate.go_on_until(lambda: stands(self.engine, self.state))
        await self.until(self.gate.reached.is_set)
        await self.happen(server, others, mine, target, monkeypatch)
        seen = await asyncio.wait_for(target, 60)
        if self.event == "step error":
            await asyncio.gather(*beside)
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        await self.until(lambda: is_clean(self.engine))
        await others.close()
        await mine.close()
        if self.event != "shutdown":
            await server.drain_and_stop()
        return seen

    async def happen(
        self,
        server: OctavoServer,
        others: grpc.aio.Channel,
        mine: grpc.aio.Channel,
        target: asyncio.Task[Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        event, drain = self.event, None
        if event == "cancel":
            data = pb.AbortRequest(request_id=TARGET).SerializeToString()
            answer = await others.unary_unary(SERVICE + "Abort")(data)
            assert pb.AbortResponse.FromString(answer).aborted
        elif event == "deadline":
            later = self.engine.clock.now_s() + 1001.0
            monkeypatch.setattr(self.engine.clock, "now_s", lambda: later)
        elif event == "step error":
            self.gate.fault = RuntimeError("out of memory")
        elif event == "client gone":
            await mine.close()
            streams = server.front.ready_engine()._streams
            await self.until(lambda: not streams.labelled(TARGET, ""))
        else:
            drain = asyncio.create_task(server.drain_and_stop())
            await asyncio.sleep(0.02)
        self.gate.go_on.set()
        if drain is not None:
            assert await drain is Ending.WHOLE

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture
def swaps(monkeypatch: pytest.MonkeyPatch, built: Any) -> Callable[[bool], None]:
    """Makes copies to the host look cheap, or dear."""

    def choose(cheap: bool) -> None:
        for name in ("observe_copy", "observe_timed_copy"):
            monkeypatch.setattr(Forecast, name, lambda self, num_pages, seconds: None)
        built.scheduler.forecast.page_copy_s = 1e-9 if cheap else 1e3

    return choose


@pytest.fixture(scope="module")
def want(built: Any) -> list[int]:
    """The target's tokens when nothing happens."""
    request = pb.GenerateRequest.FromString(message(TARGET, 70, 50))
    from octavo.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    prompt = list(request.prompt_token_ids.ids)
    built.submit(built.inputs.process("alone", prompt, params, now_s=built.clock.now_s()))
    while True:
        outputs = built.step()
        if outputs and outputs[0].finished:
            return list(outputs[0].outputs[0].token_ids)


ENDS: dict[str, grpc.StatusCode] = {
    "cancel": grpc.StatusCode.CANCELLED,
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
    "client gone": grpc.StatusCode.CANCELLED,
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("call", ["unary", "streaming"])
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("again", range(int(os.environ.get("OCTAVO_CLEANUP_REPEATS", "1"))))
def test_everything_comes_back(
    built: Any,
    want: list[int],
    swaps: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
    event: str,
    call: str,
    state: str,
    again: int,
) -> None:
    swaps(state == "swapped")
    seen = asyncio.run(_in_time(Scene(built, call, state, event).play(monkeypatch)))
    monkeypatch.undo()
    built.check_integrity()
    assert is_clean(built)
    if event == "step error":
        assert seen == want
    elif event == "shutdown":
        assert isinstance(seen, grpc.StatusCode)
    else:
        assert seen is ENDS[event]


async def _in_time(scene: Awaitable[Any]) -> Any:
    async with asyncio.timeout(120):
        return await scene
