"""Work on long messages in threads: others' tokens come between its parts.

What a message asks for is checked and translated in Python, at some ten kilobytes a millisecond. A
thread gives the interpreter up whenever the event loop wants it, which waits for a fraction of a
millisecond at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import TypeVar, TypeVarTuple, Unpack

SHORT_BYTES = 16_384
"""A message of that many takes a millisecond or two: not worth a thread."""
NUM_THREADS = 2
"""Others than asyncio's own, of which some wait for grammars."""
MESSAGE_BYTES: ContextVar[int] = ContextVar("message_bytes", default=0)
"""Of the current call. Each protocol sets it as it reads the message."""

_threads = ThreadPoolExecutor(NUM_THREADS, "octavo-messages")
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


async def beside_loop(work: Callable[[Unpack[_Ts]], _T], *args: *_Ts) -> _T:
    """What the work returns: done in a thread if the current call's message is long, else here."""
    if MESSAGE_BYTES.get() <= SHORT_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args))
