"""Tokens for gRPC: every call but a health check needs one, if the server has any."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health

from octavo.engine.errors import InvalidRequestError, OctavoError
from octavo.server.auth import TokenFile
from octavo.server.caller import CALLER
from octavo.server.grpc_refusal import refuse
from octavo.server.kserve.service import OPEN_METHODS
from octavo.server.request_stats import RequestStats
from octavo.server.smg.service import OPEN_METHODS as SMG_OPEN_METHODS

_OPEN = (f"/{health.SERVICE_NAME}/", *OPEN_METHODS, *SMG_OPEN_METHODS)
"""Load balancers ask for health without a token."""


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a good token as UNAUTHENTICATED, before their message is read.

    Args:
        tokens: that open the server; None lets everybody in.
        apart: tokens of services by name; these open them, and `tokens` do not.
        stats: counts refusals; None counts none.
    """

    def __init__(
        self,
        tokens: TokenFile | None,
        apart: Mapping[str, TokenFile] = {},
        stats: RequestStats | None = None,
    ) -> None:
        self._tokens = tokens
        self._stats = stats
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
        try:
            header = _authorization(handler_call_details.invocation_metadata or ())
            if tokens is not None:
                CALLER.set(tokens.check(header))
        except OctavoError as error:
            return _refusing(handler, error, self._stats)
        return handler


def _authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The one value of that name; servers differ in which of several they read."""
    values = [value for key, value in metadata if key == "authorization"]
    if len(values) > 1:
        raise InvalidRequestError("authorization", "several values", "at most one value")
    return values[0] if values and isinstance(values[0], str) else None


def _refusing(handler: Any, error: OctavoError, stats: RequestStats | None) -> Any:
    """A handler of the same kind that answers with the error's status."""

    async def run(request: Any, context: Any) -> None:
        await refuse(context, error, stats)

    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[handler.request_streaming, handler.response_streaming](run)
