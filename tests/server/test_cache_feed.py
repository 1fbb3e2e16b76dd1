"""Followers of a prefix cache, whenever they come, know what is in it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.engine.kv.cache_events import CacheCleared, CacheEvents, PagesRemoved, PagesStored
from octavo.server import cache_feed
from octavo.server.cache_feed import Batch, CacheFeed


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def stored(first: int, count: int, parent: int | None = None) -> PagesStored:
    names = tuple(name(number) for number in range(first, first + count))
    above = None if parent is None else name(parent)
    return PagesStored(names, above, tuple(range(2 * first, 2 * (first + count))))


def known(batches: list[Batch]) -> set[bytes]:
    """What a reader of these batches knows."""
    found: set[bytes] = set()
    for batch in batches:
        for event in batch.events:
            if isinstance(event, CacheCleared):
                found.clear()
            elif isinstance(event, PagesRemoved):
                assert found.issuperset(event.names)
                found -= set(event.names)
            else:
                assert event.parent is None or event.parent in found
                found |= set(event.names)
    return found


def follow(scenario: Any) -> None:
    async def main() -> None:
        told = CacheEvents()
        feed = CacheFeed(told, 2, clock=lambda: 1000.0)
        async with asyncio.timeout(20):
            await scenario(feed, told)

    asyncio.run(main())


def tell(told: CacheEvents, event: Any) -> None:
    if isinstance(event, PagesStored):
        told.stored(event.names, event.parent, event.token_ids)
    elif isinstance(event, PagesRemoved):
        told.removed(event.names)
    else:
        told.cleared()


async def read(feed: CacheFeed, last: int, count: int) -> list[Batch]:
    stream = feed.batches(last)
    try:
        return [await anext(stream) for _ in range(count)]
    finally:
        await stream.aclose()


def test_who_comes_first_sees_nothing_and_then_what_comes() -> None:
    async def scenario(feed: CacheFeed, told: CacheEvents) -> None:
        stream = feed.batches(0)
        whole = await anext(stream)
        assert whole.part is not None
        assert (whole.events, whole.part.count) == ((CacheCleared(),), 1)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        tell(told, stored(1, 3))
        feed.collect()
        batch = await waiting
        assert (batch.number, batch.events) == (whole.number + 1, (stored(1, 3),))
        assert batch.part is None
        feed.close()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    follow(scenario)


def test_who_comes_late_is_told_the_whole_parents_first(monkeypatch: Any) -> None:
    monkeypatch.setattr(cache_feed, "PART_PAGES", 3)

    async def scenario(feed: CacheFeed, told: CacheEvents) -> None:
        for event in (
            stored(1, 4), stored(10, 2, parent=2), PagesRemoved((name(4), name(99))),
            stored(20, 3), PagesRemoved((name(2),)), stored(2, 1, parent=1),
        ):  # fmt: skip
            tell(told, event)
            feed.collect()
        parts = await read(feed, 0, 3)
        assert [(batch.part.index, batch.part.count) for batch in parts if batch.part] == [
            (0, 3), (1, 3), (2, 3),
        ]  # fmt: skip
        # Their numbers end with the newest batch's, so that the next one follows.
        [after] = await read(feed, parts[-1].number - 1, 1)
        assert after.number == parts[-1].number
        assert known(parts) == {*map(name, (1, 2, 3, 10, 11, 20, 21, 22))}
        pages = [e for batch in parts for e in batch.events if isinstance(e, PagesStored)]
        assert parts[0].part is not None
        assert parts[0].part.num_pages == len(pages) == 8
        # Page 22 has the tokens that it was told with.
        assert next(e for e in pages if e.names == (name(22),)).token_ids == (44, 45)

    follow(scenario)


def test_what_was_never_told_is_not_told_to_be_gone() -> None:
    async def scenario(feed: CacheFeed, told: CacheEvents) -> None:
        tell(told, PagesRemoved((name(7),)))
        feed.collect()
        tell(told, stored(1, 1))
        feed.collect()
        tell(told, PagesRemoved((name(7), name(1))))
        feed.collect()
        whole, *_ = await read(feed, 0, 1)
        batches = await read(feed, whole.number - 2, 2)
        assert [batch.events for batch in batches] == [
            (stored(1, 1),), (PagesRemoved((name(1),)),),
        ]  # fmt: skip

    follow(scenario)


def test_who_comes_back_goes_on_where_it_was_or_is_told_the_whole(monkeypatch: Any) -> None:
    monkeypatch.setattr(cache_feed, "MAX_HISTORY", 3)

    async def scenario(feed: CacheFeed, told: CacheEvents) -> None:
        [start] = await read(feed, 0, 1)
        for number in range(1, 7):
            tell(told, stored(number, 1))
            feed.collect()
        recent = await read(feed, start.number + 3, 3)
        assert [batch.number - start.number for batch in recent] == [4, 5, 6]
        for last in (start.number + 2, start.number + 99, 5):  # too old, from later, another life
            [whole] = await read(feed, last, 1)
            assert whole.part is not None
            assert known([whole]) == {*map(name, range(1, 7))}

    follow(scenario)


def test_numbers_go_up_over_a_restart() -> None:
    async def scenario(feed: CacheFeed, told: CacheEvents) -> None:
        for _ in range(50):
            tell(told, CacheCleared())
            feed.collect()
        [old] = await read(feed, 0, 1)
        later = CacheFeed(CacheEvents(), 2, clock=lambda: 1001.0)
        [new] = await read(later, old.number, 1)
        assert new.number > old.number + 1
        assert new.part is not None

    follow(scenario)
