"""A bound on how long a gRPC call may wait for its message."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from octavo.engine.errors import DeadlineExceededError, InvalidRequestError, OctavoError
from octavo.server.status import status_of


class FirstMessageInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends calls whose one message does not arrive in time.

    gRPC itself waits for it without end, before any handler runs, and the call counts among the
    most that may be open: a few thousand headers would close the server to everybody. So methods
    that take one message are served as if they took a stream of them, which looks the same on the
    wire and begins with the header. That also lets interceptors outside this one refuse a call by
    its header alone.

    Args:
        timeout_s: seconds in which the message must arrive.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

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
        behavior = _after_message(inner, self._timeout_s)
        return make(behavior, handler.request_deserializer, handler.response_serializer)


def _after_message(inner: Callable[[Any, Any], Awaitable[Any]], timeout_s: float) -> Any:
    async def run(requests: Any, context: Any) -> Any:
        error: OctavoError
        try:
            async with asyncio.timeout(timeout_s):
                request = await context.read()
        except TimeoutError:
            error = DeadlineExceededError(f"the message did not arrive within {timeout_s:g} s")
        except DecodeError:
            error = InvalidRequestError("message", "bytes", "a well-formed message of this method")
        else:
            if request is not grpc.aio.EOF:
                return await inner(request, context)
            error = InvalidRequestError("message", "none", "one message")
        return await context.abort_with_status(rpc_status.to_status(status_of(error)))

    return run
