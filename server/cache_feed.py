"""What the prefix cache holds, for routers that follow it: the whole, then what comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.engine.config import of_one_engine
from octavo.engine.engine import Engine
from octavo.engine.errors import InvalidConfigError
from octavo.engine.kv.cache_events import (
    CacheCleared,
    CacheEvent,
    CacheEvents,
    PagesRemoved,
    PagesStored,
)
from octavo.engine.kv.page_hash import PageHash

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

PERIOD_S = 0.05
"""How often events are taken from the engine: those of a period are one batch."""
MAX_HISTORY = 4096
"""Batches that are kept for followers that come back."""
PART_PAGES = 1024
"""Pages in a part of the whole: a message of some 100 KB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Which part of the whole a batch is.

    Attributes:
        index, count: of the part, and how many there are.
        num_pages: in all of them.
    """

    index: int
    count: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Events of one period.

    Attributes:
        number: one more than that of the batch before.
        unix_s: when they were taken.
        events: in their order.
        part: set in a part of the whole, which replaces what its reader knew before.
    """

    number: int
    unix_s: float
    events: tuple[CacheEvent, ...]
    part: Part | None = None


class CacheFeed:
    """Follows one engine's prefix cache. Lives in the event loop.

    Batches are numbered from the milliseconds of the start on. There are fewer of them than
    milliseconds, so that numbers go up over a restart, too, and whoever comes back with one of an
    earlier life is told the whole.

    Args:
        events: what the engine's thread writes.
        page_size: tokens in a page.
        clock: Unix seconds.
    """

    def __init__(
        self, events: CacheEvents, page_size: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.page_size = page_size
        self._events = events
        self._clock = clock
        self._number = int(clock() * 1000)
        self._pages: dict[PageHash, PagesStored] = {}
        self._history: deque[Batch] = deque(maxlen=MAX_HISTORY)
        self._news = asyncio.Event()
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to take events."""
        self._task = asyncio.create_task(self._run())

    def close(self) -> None:
        """Ends all followers' streams."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        self._news.set()

    def collect(self) -> None:
        """Takes what the engine has told since the last time."""
        told = tuple(event for event in map(self._apply, self._events.take()) if event is not None)
        if told:
            self._number += 1
            self._history.append(Batch(number=self._number, unix_s=self._clock(), events=told))
            self._news.set()
            self._news = asyncio.Event()

    async def batches(self, last: int) -> AsyncGenerator[Batch, None]:
        """Batches without end: those behind the last one that a reader has, or else the whole and
        what comes behind it.

        Args:
            last: its number; 0 for none.
        """
        while not self._is_closed:
            news, missed = self._news, self.missed(last)
            for batch in missed:
                yield batch
                last = batch.number
            if not missed:
                await news.wait()

    def missed(self, last: int) -> list[Batch]:
        """Batches behind the last one that a reader has, as far as there are any; the whole where
        they are not kept.

        Args:
            last: its number; 0 for none.
        """
        oldest = self._history[0].number if self._history else self._number + 1
        if oldest - 1 <= last <= self._number:
            return [batch for batch in self._history if batch.number > last]
        return list(self._whole())

    def _apply(self, event: CacheEvent) -> CacheEvent | None:
        """Enters an event in what is known; the event as it is told, None for none of it."""
        if isinstance(event, CacheCleared):
            self._pages.clear()
            return event
        if isinstance(event, PagesRemoved):
            names = tuple(name for name in event.names if self._pages.pop(name, None) is not None)
            return PagesRemoved(names) if names else None
        size, parent = self.page_size, event.parent
        for index, name in enumerate(event.names):
            tokens = event.token_ids[index * size : (index + 1) * size]
            self._pages[name] = PagesStored((name,), parent, tokens)
            parent = name
        return event

    def _whole(self) -> Iterator[Batch]:
        """All that is known, in parts whose numbers end with the newest batch's."""
        pages = list(self._parents_first())
        count = max(1, -(-len(pages) // PART_PAGES))
        for index in range(count):
            events: list[CacheEvent] = [] if index else [CacheCleared()]
            events += pages[index * PART_PAGES : (index + 1) * PART_PAGES]
            yield Batch(
                number=self._number - count + 1 + index,
                unix_s=self._clock(),
                events=tuple(events),
                part=Part(index=index, count=count, num_pages=len(pages)),
            )

    def _parents_first(self) -> Iterator[PagesStored]:
        children: dict[PageHash | None, list[PageHash]] = defaultdict(list)
        for name, page in self._pages.items():
            children[page.parent if page.parent in self._pages else None].append(name)
        left = children.pop(None, [])
        while left:
            name = left.pop()
            yield self._pages[name]
            left += children.pop(name, ())

    async def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                self.collect()
                await asyncio.sleep(PERIOD_S)


def feed_of(engine: AsyncEngine) -> CacheFeed:
    """The feed of an engine that was not started yet.

    Raises:
        InvalidConfigError: the engine has no prefix cache that can be followed.
    """
    inner = engine.engine
    of_one_engine(inner.config, "kv_events", True)
    assert isinstance(inner, Engine)  # a front refuses the setting
    scheduler = inner.core.scheduler
    if not scheduler.can_tell_cache_events:
        allowed = "false, unless the model has a prefix cache and no sliding windows"
        raise InvalidConfigError("kv_events", True, allowed)
    events = CacheEvents()
    scheduler.tell_cache_events(events)
    return CacheFeed(events, scheduler.limits.page_size)
