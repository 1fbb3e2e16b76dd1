"""A server's life: bind, load, serve, drain, stop.

The port is bound before the model is loaded, so that health checks can read NOT_SERVING meanwhile.
SIGTERM or SIGINT while loading ends the process at once (nothing is in flight); afterwards the
first one drains: health turns NOT_SERVING, new generations are refused, those in flight finish for
up to `drain_s`. A second one stops at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from octavo.engine.errors import InvalidConfigError
from octavo.server.grpc_service import SERVICE, OctavoService

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

HEALTH_PERIOD_S = 0.5
"""How often the engine's own health is read."""
STOP_GRACE_S = 1.0
"""For the last answers to leave, once nothing is generated any more."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """How a server listens and stops. Immutable; checked on construction.

    Attributes:
        host: address to bind.
        grpc_port: port to bind; 0 takes a free one.
        max_message_bytes: largest request accepted.
        drain_s: seconds that requests in flight get to finish when the server is told to stop.
        keepalive_s: a client silent this long is pinged, and dropped if it does not answer.
    """

    host: str = "127.0.0.1"
    grpc_port: int = 50051
    max_message_bytes: int = 4 * 1024 * 1024
    drain_s: float = 30.0
    keepalive_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.grpc_port <= 65535:
            raise InvalidConfigError("grpc_port", self.grpc_port, "0 (any free port) to 65535")
        if self.max_message_bytes < 1024:
            raise InvalidConfigError("max_message_bytes", self.max_message_bytes, "at least 1024")
        if not 0 <= self.drain_s < float("inf"):
            raise InvalidConfigError("drain_s", self.drain_s, "a finite number of at least 0")
        if not 0 < self.keepalive_s < float("inf"):
            raise InvalidConfigError("keepalive_s", self.keepalive_s, "a finite number above 0")

    def channel_options(self) -> list[tuple[str, int]]:
        """gRPC server options."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            # Two servers on one port would silently share its calls.
            ("grpc.so_reuseport", 0),
            ("grpc.keepalive_time_ms", int(self.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", int(self.keepalive_s * 1000)),
        ]


class OctavoServer:
    """The gRPC server of one engine: `bind`, `attach` an engine, `drain_and_stop`."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._service = OctavoService()
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=config.channel_options())
        self._server.add_generic_rpc_handlers((self._service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._serving = False
        self._watch: asyncio.Task[None] | None = None

    async def bind(self) -> str:
        """Listens, not serving yet.

        Returns: the bound address, with its real port.

        Raises:
            InvalidConfigError: the address cannot be bound.
        """
        await self._set_serving(False)
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        address = f"{host}:{self._config.grpc_port}"
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise InvalidConfigError(
                "grpc_port", address, "an address of this machine whose port is free"
            ) from error
        await self._server.start()
        return f"{host}:{port}"

    async def attach(self, engine: AsyncEngine) -> None:
        """Starts the engine and serves."""
        # What is loaded stays: the collector need not walk it again while requests wait.
        gc.collect()
        gc.freeze()
        await engine.start()
        self._service.engine = engine
        await self._set_serving(engine.is_ready and engine.is_healthy)
        self._watch = asyncio.create_task(self._watch_engine(engine))

    async def drain_and_stop(self, *, hurry: asyncio.Event | None = None) -> None:
        """Refuses new work, lets what is in flight finish, stops.

        Args:
            hurry: when set, what is in flight is cancelled at once.
        """
        self._service.draining = True
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._idle(self._config.drain_s, hurry)
        await self._server.stop(0 if self._service.num_inflight else STOP_GRACE_S)
        # Calls that were cut off are cancelled by now: their requests end before the engine does.
        await self._idle(STOP_GRACE_S)
        if self._service.engine is not None:
            await self._service.engine.shutdown()

    async def _idle(self, timeout_s: float, hurry: asyncio.Event | None = None) -> None:
        """Waits until nothing is in flight, for `timeout_s`, or until `hurry` is set."""
        end_s = time.monotonic() + timeout_s
        while self._service.num_inflight and time.monotonic() < end_s:
            if hurry is not None and hurry.is_set():
                return
            await asyncio.sleep(0.02)

    async def _watch_engine(self, engine: AsyncEngine) -> None:
        while True:
            await self._set_serving(engine.is_ready and engine.is_healthy)
            await asyncio.sleep(HEALTH_PERIOD_S)

    async def _set_serving(self, serving: bool) -> None:
        if self._serving and not serving:
            _log.error("the engine is not healthy any more: health is NOT_SERVING")
        self._serving = serving
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", SERVICE):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


async def serve(
    make_engine: Callable[[], AsyncEngine],
    config: ServeConfig,
    *,
    announce: Callable[[str, AsyncEngine], None],
) -> None:
    """Runs a server until SIGTERM or SIGINT.

    Args:
        make_engine: builds the engine; runs in a thread of its own.
        announce: called once with the bound address when the server is ready.

    Raises:
        InvalidConfigError: the address cannot be bound.
        OctavoError: whatever `make_engine` raised.
    """
    server = OctavoServer(config)
    address = await server.bind()
    with _Signals() as signals:
        try:
            engine = await _in_daemon_thread(make_engine)
            await server.attach(engine)
        except BaseException:
            await server.drain_and_stop()
            raise
        signals.catch()
        announce(address, engine)
        await signals.stop.wait()
        _log.info("draining")
        await server.drain_and_stop(hurry=signals.hurry)


class _Signals:
    """SIGTERM and SIGINT: by default they end the process; once caught they set events."""

    caught: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()

    def __enter__(self) -> _Signals:
        self._before = [(number, signal.signal(number, signal.SIG_DFL)) for number in self.caught]
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)

    def catch(self) -> None:
        for number in self.caught:
            asyncio.get_running_loop().add_signal_handler(number, self._receive)

    def _receive(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


async def _in_daemon_thread(work: Callable[[], _T]) -> _T:
    """Like `asyncio.to_thread`, but the process never waits for the thread at exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    threading.Thread(target=run, name="octavo-load", daemon=True).start()
    return await future
