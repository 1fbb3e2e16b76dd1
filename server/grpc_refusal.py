"""How a gRPC call is refused, and what the end of a call looks like from inside its handler."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NoReturn

import grpc
from grpc_status import rpc_status

from octavo.engine.errors import OctavoError
from octavo.server.answered_errors import forget_frames
from octavo.server.request_stats import RequestStats
from octavo.server.status import status_of

GONE_ERRORS = (grpc.aio.UsageError, grpc.aio.InternalError)
"""What grpc raises when a handler writes to a call that has ended meanwhile."""
GONE_CHECKS, GONE_CHECK_S = 25, 0.02
"""How often, and how far apart, a failed call is asked whether its client has left."""


async def refuse(context: Any, error: OctavoError, stats: RequestStats | None = None) -> NoReturn:
    """Ends a call with an error's status.

    Args:
        context: of the call.
        error: why.
        stats: counts the refusal; None counts none.

    Raises:
        grpc.aio.AbortError: always, for grpc itself; but
        asyncio.CancelledError: the call had ended already: there is no one to tell.
    """
    if stats is not None:
        stats.refused(error)
    forget_frames(error)
    with contextlib.suppress(*GONE_ERRORS):
        try:
            await context.abort_with_status(rpc_status.to_status(status_of(error)))
        except grpc.aio.AbortError as abort:
            # The call refers to it; once grpc has caught it, nobody wants to know where it came by.
            asyncio.get_running_loop().call_soon(forget_frames, abort)
            raise
    raise asyncio.CancelledError


async def has_left(context: Any, error: BaseException) -> bool:
    """Whether an error is what a handler meets when its client has left.

    A write fails before grpc tells the handler that the call was cancelled: that is waited for.

    Args:
        context: of the call.
        error: what the handler raised, or a group of such.
    """
    if isinstance(error, BaseExceptionGroup):
        others: BaseException | None = error.split(GONE_ERRORS)[1]
    else:
        others = None if isinstance(error, GONE_ERRORS) else error
    if others is not None:
        return bool(context.done())
    for _ in range(GONE_CHECKS):
        if context.done():
            return True
        await asyncio.sleep(GONE_CHECK_S)
    return False
