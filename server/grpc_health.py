"""grpc.health.v1, which load balancers ask without a token."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.engine.errors import OverloadedError
from octavo.server.call_limit import CallLimit
from octavo.server.grpc_refusal import GONE_ERRORS, refuse
from octavo.server.request_stats import RequestStats

MOST_WATCHES = 1024

Status = health_pb2.HealthCheckResponse.ServingStatus


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health by service name.

    Unlike grpc's own, a watcher that does not read delays neither the others nor `set`, and there
    is a limit to how many may watch. Lives in the event loop.

    Args:
        stats: counts refusals.
    """

    def __init__(self, stats: RequestStats) -> None:
        self._stats = stats
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._watches = CallLimit(MOST_WATCHES, "health watches")
        self._final = False

    def set(self, service: str, status: int) -> None:
        """A service's health from now on; "" stands for the server."""
        if self._final or self._statuses.get(service) == status:
            return
        self._statuses[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    def enter_graceful_shutdown(self) -> None:
        """Every service is NOT_SERVING, for good."""
        for service in list(self._statuses):
            self.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        self._final = True

    async def Check(self, request: Any, context: Any) -> Any:
        """A service's health now; NOT_FOUND if there is no such service."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> None:
        """A service's health now, and whenever it changes."""
        try:
            with self._watches.held():
                last = None
                while True:
                    changed = self._changed
                    status = self._statuses.get(
                        request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                    )
                    if status != last:
                        await context.write(health_pb2.HealthCheckResponse(status=status))
                    last = status
                    await changed.wait()
        except OverloadedError as error:
            await refuse(context, error, self._stats)
        except GONE_ERRORS:
            raise asyncio.CancelledError from None
