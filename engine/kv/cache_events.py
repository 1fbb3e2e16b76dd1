"""What comes into a prefix cache and goes out of it, for those who follow it from outside."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.kv.page_hash import PageHash, root_hash

MAX_WAITING = 65_536
"""Events that nobody has taken. Above that they are dropped, and the reader is told that it knows
nothing any more."""
SHARED_ROOT = root_hash("", "")
"""Parent of pages that belong to no tenant and no cache salt: of them alone is anything told, as
events hold the tokens."""


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Full pages, one behind the other, that can be found from now on.

    Attributes:
        names: of each.
        parent: name of the page before them; None where they begin a prompt.
        token_ids: of all of them.
    """

    names: tuple[PageHash, ...]
    parent: PageHash | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages that can be found no longer; of some of them nothing may have been told.

    Attributes:
        names: of each.
    """

    names: tuple[PageHash, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing can be found any more, or nothing is known of it."""


CacheEvent = PagesStored | PagesRemoved | CacheCleared


class CacheEvents:
    """Events in their order. One thread writes them and another one takes them."""

    def __init__(self) -> None:
        self._waiting: deque[CacheEvent] = deque()

    def stored(
        self, names: Sequence[PageHash], parent: PageHash | None, token_ids: Sequence[int]
    ) -> None:
        """Pages are about to be findable; see `PagesStored`."""
        self._add(PagesStored(tuple(names), parent, tuple(token_ids)))

    def removed(self, names: Sequence[PageHash]) -> None:
        """Pages were given up."""
        self._add(PagesRemoved(tuple(names)))

    def cleared(self) -> None:
        """Every page was."""
        self._add(CacheCleared())

    def take(self) -> list[CacheEvent]:
        """What came since the last time."""
        return [self._waiting.popleft() for _ in range(len(self._waiting))]

    def _add(self, event: CacheEvent) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting = deque((CacheCleared(),))
        self._waiting.append(event)
