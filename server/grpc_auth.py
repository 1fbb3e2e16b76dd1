"""Tokens for gRPC: every call but a health check needs one, if the server has any."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_status import rpc_status

from octavo.engine.errors import OctavoError
from octavo.server.auth import TokenFile
from octavo.server.caller import CALLER
from octavo.server.kserve.service import OPEN_METHODS
from octavo.server.status import status_of

_OPEN = (f"/{health.SERVICE_NAME}/", *OPEN_METHODS)
"""Load balancers ask for health without a token."""


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a good token as UNAUTHENTICATED, before their message is read.

    Args:
        tokens: that open the server; None lets everybody in.
        apart: tokens of services by name; these open them, and `tokens` do not.
    """

    def __init__(self, tokens: TokenFile | None, apart: Mapping[str, TokenFile] = {}) -> None:
        self._tokens = tokens
        self._apart = {f"/{service}/": of_service for service, of_service in apart.items()}

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The call's own handler, or one that refuses it."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_OPEN):
            return handler
        tokens = self._tokens
        for prefix, of_service in self._apart.items():
            if method.startswith(prefix):
                tokens = of_service
        if tokens is None:
            return handler
        try:
            header = dict(handler_call_details.invocation_metadata).get("authorization")
            CALLER.set(tokens.check(header if isinstance(header, str) else None))
        except OctavoError as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: OctavoError) -> Any:
    """A handler of the same kind that answers with the error's status."""
    status = rpc_status.to_status(status_of(error))

    async def refuse(request: Any, context: Any) -> None:
        await context.abort_with_status(status)

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[handler.request_streaming, handler.response_streaming](refuse)
