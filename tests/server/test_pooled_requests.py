"""Texts of one body: others' turns of the event loop come between them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from octavo.engine.pooling.params import PoolingParams
from octavo.server.pooled_requests import TEXTS_AT_ONCE, pool_all

NUM_TEXTS = 3 * TEXTS_AT_ONCE + 1


class EndsTogether:
    """A front whose requests under way all end in one turn of the loop, as in one step."""

    def __init__(self) -> None:
        self.turn, self.begun = 0, Counter[int]()
        self._waiting: list[asyncio.Future[None]] = []

    async def generate(self, text: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        self.begun[self.turn] += 1
        self._waiting.append(asyncio.get_running_loop().create_future())
        await self._waiting[-1]
        yield text

    async def play(self) -> None:
        num_seen = 0
        while True:
            await asyncio.sleep(0)
            self.turn += 1
            # Once nothing has begun for a while, all that wait end.
            num_seen = num_seen + 1 if not self.begun[self.turn - 1] else 0
            if num_seen > 10:
                for each in self._waiting:
                    each.done() or each.set_result(None)
                self._waiting.clear()


def test_texts_begin_one_in_a_turn_of_the_loop() -> None:
    async def run() -> EndsTogether:
        front = EndsTogether()
        playing = asyncio.ensure_future(front.play())
        texts = [str(number) for number in range(NUM_TEXTS)]
        names = ["input"] * NUM_TEXTS
        found = await pool_all(front, texts, PoolingParams(), None, {}, names)  # type: ignore[arg-type]
        assert found == texts
        playing.cancel()
        return front

    front = asyncio.run(asyncio.wait_for(run(), 30))
    assert sum(front.begun.values()) == NUM_TEXTS
    assert max(front.begun.values()) == 1
