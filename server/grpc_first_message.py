"""A bound on how long a gRPC call may wait for its message."""

from __future__ import annotations

import asyncio
import inspect
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from octavo.engine.errors import DeadlineExceededError, InvalidRequestError, OctavoError
from octavo.server.grpc_refusal import refuse
from octavo.server.request_stats import RequestStats

MOST_WAITING = 4096
"""Calls whose message is waited for at once; above that, the oldest one's time is over."""


class FirstMessageInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends calls whose one message does not arrive in time.

    gRPC itself waits for it without end, before any handler runs, and the call counts among the
    most that may be open: a few thousand headers would close the server to everybody. So methods
    that take one message are served as if they took a stream of them, which looks the same on the
    wire and begins with the header. That also lets interceptors outside this one refuse a call by
    its header alone.

    Args:
        timeout_s: seconds in which the message must arrive.
        stats: counts refusals; None counts none.
    """

    def __init__(self, timeout_s: float, stats: RequestStats | None = None) -> None:
        self._timeout_s = timeout_s
        self._stats = stats
        self._waits: OrderedDict[asyncio.Timeout, None] = OrderedDict()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The call's own handler, behind the wait for its message."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if inspect.isasyncgenfunction(inner):
            return handler
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        behavior = self._after_message(inner)
        return make(behavior, handler.request_deserializer, handler.response_serializer)

    def _after_message(self, inner: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        async def run(requests: Any, context: Any) -> Any:
            error: OctavoError
            try:
                async with asyncio.timeout(self._timeout_s) as wait:
                    self._begin(wait)
                    try:
                        request = await context.read()
                    finally:
                        self._waits.pop(wait, None)
            except TimeoutError:
                error = DeadlineExceededError(
                    f"the message did not arrive within {self._timeout_s:g} s"
                )
            except DecodeError:
                error = InvalidRequestError(
                    "message", "bytes", "a well-formed message of this method"
                )
            else:
                if request is not grpc.aio.EOF:
                    return await inner(request, context)
                error = InvalidRequestError("message", "none", "one message")
            return await refuse(context, error, self._stats)

        return run

    def _begin(self, wait: asyncio.Timeout) -> None:
        """Notes a wait; too many end the oldest one."""
        self._waits[wait] = None
        if len(self._waits) > MOST_WAITING:
            oldest, _ = self._waits.popitem(last=False)
            oldest.reschedule(asyncio.get_running_loop().time())
