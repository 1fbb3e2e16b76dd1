"""How many gRPC calls are answered at once, and which of them count."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health

from octavo.engine.errors import OverloadedError
from octavo.server.call_limit import CallLimit
from octavo.server.grpc_refusal import refuse
from octavo.server.kserve.service import OPEN_METHODS
from octavo.server.request_stats import RequestStats
from octavo.server.smg.service import OPEN_METHODS as SMG_OPEN_METHODS

_LANES = (f"/{health.SERVICE_NAME}/", *OPEN_METHODS, *SMG_OPEN_METHODS)
"""Health is answered although everything else is full; its own service bounds the watches."""


class CallLimitInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls above a limit as RESOURCE_EXHAUSTED, with the time to try again after.

    gRPC's own limit counts calls whose message has not come, and health watches, and its refusal
    has no details. To stand inside `FirstMessageInterceptor`, so that a call counts from its
    message on. Calls that take a stream of messages have a limit of their own: they may be idle.

    Args:
        most: calls of either kind at once.
        stats: counts refusals.
    """

    def __init__(self, most: int, stats: RequestStats) -> None:
        self._calls = CallLimit(most)
        self._streams = CallLimit(most, "streams of messages")
        self._stats = stats

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The call's own handler, counted."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_LANES):
            return handler
        limit = self._streams if handler.request_streaming else self._calls
        kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
        behavior = _counted(getattr(handler, kind), limit, self._stats)
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(behavior, handler.request_deserializer, handler.response_serializer)


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _counted(inner: Any, limit: CallLimit, stats: RequestStats) -> Any:
    async def run(request: Any, context: Any) -> Any:
        try:
            limit.enter()
        except OverloadedError as error:
            await refuse(context, error, stats)
        try:
            return await inner(request, context)
        finally:
            limit.leave()

    async def run_generator(request: Any, context: Any) -> Any:
        try:
            limit.enter()
        except OverloadedError as error:
            await refuse(context, error, stats)
        try:
            async for message in inner(request, context):
                yield message
        finally:
            limit.leave()

    return run_generator if inspect.isasyncgenfunction(inner) else run
