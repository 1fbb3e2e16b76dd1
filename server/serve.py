"""A server's life: bind, load, serve, drain, stop.

The ports are bound before the model is loaded, so that health checks read NOT_SERVING meanwhile.
SIGTERM or SIGINT while loading ends the process at once (nothing is in flight); afterwards the
first one drains: health turns NOT_SERVING, new generations are refused, those in flight finish for
up to `drain_timeout_s`. A second one stops at once.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from octavo.engine.any_engine import engine_of_this_process
from octavo.engine.errors import EngineDeadError, InvalidConfigError
from octavo.engine.process.own_process import ServingProcess
from octavo.server.admin_service import SERVICE as ADMIN_SERVICE
from octavo.server.admin_service import AdminService
from octavo.server.auth import TokenFile
from octavo.server.cache_feed import feed_of
from octavo.server.chat_renderer import ChatRenderer
from octavo.server.file_limit import most_connections
from octavo.server.front import Front
from octavo.server.grpc_auth import TokenInterceptor
from octavo.server.grpc_first_message import FirstMessageInterceptor
from octavo.server.grpc_health import HealthService
from octavo.server.grpc_limits import CallLimitInterceptor
from octavo.server.grpc_service import SERVICE, OctavoService
from octavo.server.kserve.service import SERVICE as INFERENCE_SERVICE
from octavo.server.kserve.service import InferenceService
from octavo.server.ports import check_bindable
from octavo.server.serve_config import SPARE_CALLS, ServeConfig
from octavo.server.smg.service import SERVICE as VLLM_SERVICE
from octavo.server.smg.service import VllmEngineService
from octavo.server.tracing import RequestTracer, TraceInterceptor, exporting_tracer
from octavo.server.watchdog import LoopAlarm, Watchdog
from octavo.server.zmq_events import ZmqPublisher

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine
    from octavo.server.http.server import HttpServer

HEALTH_PERIOD_S = 0.5
"""How often the engine's own health is read."""
LOOP_PERIODS = 10
"""Of these in which the event loop must have come round, however soon a step counts as stuck."""
STOP_GRACE_S = 1.0
"""For the last answers to leave, once nothing is generated any more."""
ENGINE_STOP_S = 10.0
"""For the engine's thread to end its last step."""

_SERVICES = (SERVICE, INFERENCE_SERVICE, VLLM_SERVICE)
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a server listens.

    Attributes:
        grpc: host and port.
        http: URL, or None without HTTP.
    """

    grpc: str
    http: str | None


class Ending(enum.Enum):
    """How an engine ended, and with it the server."""

    WHOLE = "whole"
    COMPILING = "compiling"
    """Nothing is in flight any more; a thread behind is still in the compiler, which cannot be
    interrupted."""
    HANGING = "hanging"
    """The engine's thread hangs in a step."""


class OctavoServer:
    """The servers of one engine: `bind`, `attach` an engine, `drain_and_stop`.

    Args:
        config: how to listen and stop.
        log_prompts: whether the log of requests may hold their prompts.
        process: makes the settings of the whole process; None leaves those as they are, as in a
            process that is not the server's own.

    Raises:
        InvalidConfigError: a file that the configuration names cannot be used, or HTTP is wanted
            and its packages are not installed.
    """

    def __init__(
        self,
        config: ServeConfig,
        *,
        log_prompts: bool = False,
        process: ServingProcess | None = None,
    ) -> None:
        self._config = config
        self._process = process
        self.told_to_drain = asyncio.Event()
        """Set when an operator has asked for the server's end."""
        self.front = Front(
            max_concurrent_requests=config.max_concurrent_requests,
            request_timeout_s=config.request_timeout_s,
            log_prompts=log_prompts,
        )
        tokens = None if config.token_file is None else TokenFile(config.token_file)
        admins = None if config.admin_token_file is None else TokenFile(config.admin_token_file)
        apart = {} if admins is None else {ADMIN_SERVICE: admins}
        self._credentials = config.grpc_credentials()
        endpoint = config.otlp_traces_endpoint
        self._tracing = None if endpoint is None else exporting_tracer(endpoint)
        stats = self.front.stats
        self._health = HealthService(stats)
        self._grpc = grpc.aio.server(
            options=[
                *config.channel_options(),
                (
                    "grpc.max_allowed_incoming_connections",
                    most_connections(config.max_connections),
                ),
            ],
            interceptors=(
                TokenInterceptor(tokens, apart, stats),
                TraceInterceptor(),
                FirstMessageInterceptor(config.receive_timeout_s, stats),
                CallLimitInterceptor(config.max_concurrent_requests + SPARE_CALLS, stats),
            ),
        )
        services = (
            OctavoService(self.front),
            InferenceService(self.front),
            VllmEngineService(self.front),
        )
        self._grpc.add_generic_rpc_handlers(tuple(service.handlers() for service in services))
        if admins is not None:
            service = AdminService(self.front, self.told_to_drain.set, config.profile_dir)
            self._grpc.add_generic_rpc_handlers((service.handlers(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        names = (*_SERVICES, *apart)
        reflection.enable_server_reflection(
            (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._grpc
        )
        self._http = None if config.http_port is None else _http_server(config, self.front, tokens)
        self._serving = False
        self._publisher: ZmqPublisher | None = None
        self._watch: asyncio.Task[None] | None = None
        self._alarm = LoopAlarm(max(config.stuck_after_s, LOOP_PERIODS * HEALTH_PERIOD_S))
        self._grpc_ended: asyncio.Task[Any] | None = None

    async def bind(self) -> Addresses:
        """Listens, not serving yet.

        Raises:
            InvalidConfigError: an address cannot be bound.
        """
        self._set_serving(False)
        config = self._config
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        wrong = InvalidConfigError(
            "grpc_port", address, "an address of this machine whose port is free"
        )
        try:
            # gRPC writes lines of its own to standard error before it says that it cannot bind.
            check_bindable(config.host, config.grpc_port)
        except OSError as error:
            raise wrong from error
        try:
            if self._credentials is None:
                port = self._grpc.add_insecure_port(address)
            else:
                port = self._grpc.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise wrong from error
        await self._grpc.start()
        try:
            http = None if self._http is None else await self._http.start()
        except InvalidConfigError:
            await self._grpc.stop(0)
            raise
        return Addresses(grpc=f"{host}:{port}", http=http)

    async def attach(self, engine: AsyncEngine) -> None:
        """Starts the engine and serves."""
        if self._process is not None:
            self._process.leave_out_what_is_loaded()
        engine.stream_interval_s = self._config.stream_interval_ms / 1e3
        if self._tracing is not None:
            self.trace(engine, self._tracing[0])
        if self._config.kv_events:
            self.front.cache_feed = feed_of(engine)
            self.front.cache_feed.start()
            if (endpoint := self._config.kv_events_endpoint) is not None:
                replay, topic = self._config.kv_events_replay_endpoint, self._config.kv_events_topic
                self._publisher = ZmqPublisher(self.front.cache_feed, endpoint, replay, topic)
                self._publisher.start()
        tokenizer = engine.tokenizer
        if tokenizer.chat_template is not None:
            self.front.renderer = ChatRenderer(tokenizer.chat_template, tokenizer.named_tokens)
            await self.front.renderer.start()
        await engine.start()
        if self._process is not None:
            self._process.prefer_engine_thread()
        self.front.engine = engine
        self._set_serving(self.front.is_ready)
        self._grpc_ended = asyncio.create_task(self._grpc.wait_for_termination())
        self._watch = asyncio.create_task(self._watch_engine(engine))

    def trace(self, engine: AsyncEngine, tracer: Any) -> None:
        """Makes spans of the engine's requests with an OpenTelemetry tracer. Before `attach`."""
        endpoint = self._config.otlp_traces_endpoint
        core = engine_of_this_process(engine.engine, "otlp_traces_endpoint", endpoint).core
        tracing = RequestTracer(tracer, engine.engine.clock, engine.model_name)
        core.observe(tracing)

    async def drain_and_stop(self, *, hurry: asyncio.Event | None = None) -> Ending:
        """Refuses new work, lets what is in flight finish, stops.

        Args:
            hurry: when set, what is in flight is cancelled at once.

        Returns: how the engine ended.
        """
        self.front.draining = True
        self._health.enter_graceful_shutdown()
        if self._http is not None:
            await self._http.end_batches()
        await self._idle(self._config.drain_timeout_s, hurry)
        if self.front.num_inflight:
            _log.warning("cutting off %d requests", self.front.num_inflight)
        if self._watch is not None:
            self._watch.cancel()
        if self.front.cache_feed is not None:
            self.front.cache_feed.close()
        if self._publisher is not None:
            self._publisher.close()
        self._alarm.close()
        stops = [self._grpc.stop(0 if self.front.num_inflight else STOP_GRACE_S)]
        if self._http is not None:
            stops.append(self._http.stop(0 if self.front.num_inflight else STOP_GRACE_S))
        await asyncio.gather(*stops)
        # Calls that were cut off are cancelled by now: their requests end before the engine does.
        await self._idle(STOP_GRACE_S)
        if self.front.renderer is not None:
            self.front.renderer.close()
        engine = self.front.engine
        if engine is None:
            return Ending.WHOLE
        ending = asyncio.create_task(engine.shutdown())
        await asyncio.wait({ending}, timeout=ENGINE_STOP_S)
        if not (ending.done() or engine.is_stopped):
            _log.critical("the engine's thread hangs in a step: leaving it")
            return Ending.HANGING
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing[1])
        if not ending.done():
            _log.info("leaving a program that is still being compiled")
            return Ending.COMPILING
        await ending
        return Ending.WHOLE

    async def _idle(self, timeout_s: float, hurry: asyncio.Event | None = None) -> None:
        """Waits until nothing is in flight, for `timeout_s`, or until `hurry` is set."""
        end_s = time.monotonic() + timeout_s
        while self.front.num_inflight and time.monotonic() < end_s:
            if hurry is not None and hurry.is_set():
                return
            await asyncio.sleep(0.02)

    async def _watch_engine(self, engine: AsyncEngine) -> None:
        gap_s = LOOP_PERIODS * HEALTH_PERIOD_S
        watchdog = Watchdog(engine, self._config.stuck_after_s, longest_gap_s=gap_s)
        while True:
            self._alarm.turned()
            try:
                self.front.stuck = watchdog.look()
                if watchdog.hangs:
                    engine.give_up(EngineDeadError("the engine hangs in a step; see its log"))
                self.front.deaf = not self._is_listening()
                self._set_serving(self.front.is_ready)
                if self._process is not None:
                    self._process.tidy()
            except Exception:
                _log.exception("the engine's health could not be read")
            await asyncio.sleep(HEALTH_PERIOD_S)

    def _is_listening(self) -> bool:
        """Whether every port that was bound still takes calls."""
        grpc_ended = self._grpc_ended is not None and self._grpc_ended.done()
        return not grpc_ended and (self._http is None or self._http.is_listening)

    def _set_serving(self, serving: bool) -> None:
        if self._serving and not serving and not self.front.draining:
            _log.error("health is NOT_SERVING: %s", self.front.failing or "the engine is not ready")
        self._serving = serving
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in ("", *_SERVICES):
            self._health.set(name, status.SERVING if serving else status.NOT_SERVING)


def _http_server(config: ServeConfig, front: Front, tokens: TokenFile | None) -> HttpServer:
    try:
        from octavo.server.http.server import HttpServer
    except ImportError as error:
        allowed = f"not given, unless octavo[http] is installed ({error})"
        raise InvalidConfigError("http_port", config.http_port, allowed) from error
    return HttpServer(config, front, tokens)


async def serve(
    make_engine: Callable[[], AsyncEngine],
    config: ServeConfig,
    *,
    announce: Callable[[Addresses, AsyncEngine], None],
    log_prompts: bool = False,
) -> Ending:
    """Runs a server until SIGTERM or SIGINT, in a process of its own: see `ServingProcess`.

    Args:
        make_engine: builds the engine; runs in a thread of its own.
        announce: called once with the bound addresses when the server is ready.
        log_prompts: whether the log of requests may hold their prompts.

    Returns: how the engine ended.

    Raises:
        InvalidConfigError: an address cannot be bound.
        OctavoError: whatever `make_engine` raised.
    """
    with _Signals() as signals:
        process = ServingProcess()
        process.prepare_to_listen()
        server = OctavoServer(config, log_prompts=log_prompts, process=process)
        addresses = await server.bind()
        try:
            engine = await _in_daemon_thread(make_engine)
            await server.attach(engine)
        except BaseException:
            await server.drain_and_stop()
            raise
        signals.catch()
        announce(addresses, engine)
        waits = [signals.stop.wait(), server.told_to_drain.wait()]
        tasks = [asyncio.create_task(wait) for wait in waits]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        signals.stop.set()  # the next signal is the second
        _log.warning("draining: %d requests in flight", server.front.num_inflight)
        return await server.drain_and_stop(hurry=signals.hurry)


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
