"""Sends requests when they are meant to arrive, whatever they are sent to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from octavo.engine.simulation.workloads.bench_requests import BenchRequest
from octavo.server.load.figures import Sent


class Target(Protocol):
    """A server that is measured. Entered before the first request and left after the last."""

    async def __aenter__(self) -> Target: ...

    async def __aexit__(self, *error: object) -> None: ...

    async def send(self, request: BenchRequest) -> Sent:
        """Streams one answer; a failure is in what it returns."""
        ...


async def send_all(
    target: Target,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[Sent], None] | None = None,
) -> list[Sent]:
    """Sends the requests at their times of arrival, counted from now.

    The load is open: they are sent when they are meant to be, however slow the server is, unless
    there is a limit of requests in flight.

    Args:
        max_concurrency: that limit.
        on_end: told of each request that ended.

    Returns:
        What became of each, in their order.
    """
    slots: Any = contextlib.nullcontext()
    if max_concurrency is not None:
        slots = asyncio.Semaphore(max_concurrency)
    async with target:
        begun_s = time.perf_counter()

        async def one(request: BenchRequest) -> Sent:
            await asyncio.sleep(begun_s + request.arrival_s - time.perf_counter())
            async with slots:
                sent = await target.send(request)
            sent.traffic_class = request.traffic_class
            if on_end is not None:
                on_end(sent)
            return sent

        return list(await asyncio.gather(*map(one, requests)))
