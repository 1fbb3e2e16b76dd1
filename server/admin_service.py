"""The operator's gRPC service: drain, flush the prefix cache, record profiles and schedules."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.errors import InvalidConfigError, InvalidRequestError
from octavo.engine.observability.perfetto import perfetto_trace
from octavo.engine.observability.schedule import Schedule
from octavo.server.front import Front
from octavo.server.grpc_service import Handler, method
from octavo.server.proto.octavo.v1 import admin_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["AdminService"].full_name

MOST_TRACE_S = 60.0
LOOK_S = 2.0
"""An engine remembers a few seconds of a busy schedule."""

_log = logging.getLogger(__name__)


class AdminService:
    """The methods of octavo.v1.AdminService.

    Args:
        front: the engine's door.
        drain: begins to drain and stop the server.
        profile_dir: where profiles are written; None refuses to record any.
    """

    def __init__(self, front: Front, drain: Callable[[], None], profile_dir: str | None) -> None:
        self._front = front
        self._drain = drain
        self._profile_dir = profile_dir
        self._is_profiling = False
        self._profiler = asyncio.Lock()

    def handlers(self) -> grpc.GenericRpcHandler:
        """What `grpc.aio.Server.add_generic_rpc_handlers` takes."""
        methods: dict[str, tuple[type[Message], Handler]] = {
            "Drain": (pb.DrainRequest, self.drain),
            "FlushCache": (pb.FlushCacheRequest, self.flush_cache),
            "StartProfile": (pb.StartProfileRequest, self.start_profile),
            "StopProfile": (pb.StopProfileRequest, self.stop_profile),
            "Trace": (pb.TraceRequest, self.trace),
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                name: method(grpc.unary_unary_rpc_method_handler, handler, kind, self._front.stats)
                for name, (kind, handler) in methods.items()
            },
        )

    async def trace(self, request: pb.TraceRequest, context: Any) -> pb.TraceResponse:
        """Watches the schedule for some seconds."""
        seconds = request.seconds
        if not 0 < seconds <= MOST_TRACE_S:
            allowed = f"more than 0, at most {MOST_TRACE_S:g} seconds"
            raise InvalidRequestError("seconds", seconds, allowed)
        schedules = await watch_schedules(self._front.ready_engine(), seconds)
        trace = await asyncio.to_thread(lambda: json.dumps(perfetto_trace(schedules)).encode())
        return pb.TraceResponse(trace=trace)

    async def drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Begins what SIGTERM begins."""
        _log.warning("told to drain over gRPC")
        self._drain()
        return pb.DrainResponse(num_inflight=self._front.num_inflight)

    async def flush_cache(
        self, request: pb.FlushCacheRequest, context: Any
    ) -> pb.FlushCacheResponse:
        """Forgets every cached prefix."""
        num_pages, num_host_pages = await self._front.ready_engine().flush_prefix_cache()
        _log.warning("flushed %d cached pages and %d on the host", num_pages, num_host_pages)
        return pb.FlushCacheResponse(num_pages=num_pages, num_host_pages=num_host_pages)

    async def start_profile(
        self, request: pb.StartProfileRequest, context: Any
    ) -> pb.StartProfileResponse:
        """Begins to record what the device and the host do."""
        import jax

        directory = self._directory()
        async with self._profiler:
            if self._is_profiling:
                raise InvalidConfigError("profile", "recording", "one recording at a time")
            await asyncio.to_thread(jax.profiler.start_trace, directory)
            self._is_profiling = True
        return pb.StartProfileResponse(directory=directory)

    async def stop_profile(
        self, request: pb.StopProfileRequest, context: Any
    ) -> pb.StopProfileResponse:
        """Ends the recording and writes it."""
        import jax

        directory = self._directory()
        async with self._profiler:
            if not self._is_profiling:
                raise InvalidConfigError("profile", "not recording", "StartProfile before")
            self._is_profiling = False
            await asyncio.to_thread(jax.profiler.stop_trace)
        return pb.StopProfileResponse(directory=directory)

    def _directory(self) -> str:
        if self._profile_dir is None:
            raise InvalidConfigError("profile_dir", None, "a directory, in the server's settings")
        return self._profile_dir


async def watch_schedules(engine: AsyncEngine, seconds: float) -> list[Schedule]:
    """The schedule of the next seconds, one for each replica."""
    await engine.schedules()  # from here on it is noted
    begin_s = look_s = engine.engine.clock.now_s()
    end_s = time.monotonic() + seconds
    seen: list[Schedule] = []
    while (left_s := end_s - time.monotonic()) > 0:
        await asyncio.sleep(min(LOOK_S, left_s))
        newest = [schedule.since(look_s) for schedule in await engine.schedules()]
        look_s = engine.engine.clock.now_s()
        seen = [old + new for old, new in zip(seen, newest, strict=True)] if seen else newest
    return [schedule.since(begin_s) for schedule in seen]
