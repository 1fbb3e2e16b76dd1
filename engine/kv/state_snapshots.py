"""Snapshots of recurrent states, by the prefix that they stand for.

Pages alone restore no recurrent state: a sequence goes on from cached pages only where there is a
snapshot of the state after them, too. A sequence leaves two of them, which are the ones that others
are likely to begin with: at the end of its prompt, and where its prompt leaves what the cache holds
pages of without a snapshot, as there begin sequences that share no more than that.

A snapshot has a place on the device, which is

- free, or
- taken by a live sequence, one of whose steps writes it, until that step was committed, or
- findable by the hash of its last page, until the place is needed for another.

Steps run in the order of their plans: a place that a later plan gives away is written after all
that earlier ones read of it. Within a plan, what one row reads no other may write (`flush` ends
that).

Source: Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs", MLSys 2025, for which
states are worth their room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.engine.kv.page_hash import PageHash

ROWS_PER_SNAPSHOT = 4
"""Rows for each place, where nothing else is asked for."""


class StateSnapshots:
    """The one owner of the places; those that were not used for longest are given away first.

    Args:
        num_places: how many there are.
        num_pages: snapshots are taken at multiples of so many pages.
    """

    def __init__(self, num_places: int, num_pages: int) -> None:
        self.num_places = num_places
        self.num_pages = num_pages
        self._free = list(range(num_places - 1, -1, -1))
        self._places: dict[PageHash, int] = {}  # the one that was not used for longest comes first
        self._read: set[PageHash] = set()

    def __contains__(self, page_hash: PageHash) -> bool:
        return page_hash in self._places

    def longest(self, hashes: Sequence[PageHash], num_pages: int) -> int:
        """Pages of the longest prefix, of up to `num_pages` with these contents, that has one."""
        step = self.num_pages
        for end in range(num_pages // step * step, 0, -step):
            if hashes[end - 1] in self._places:
                return end
        return 0

    def read(self, page_hash: PageHash) -> int:
        """The place of a snapshot, which the plan at hand reads."""
        place = self._places.pop(page_hash)
        self._places[page_hash] = place
        self._read.add(page_hash)
        return place

    def take(self) -> int | None:
        """A place to be written; None if all others are read or taken."""
        if self._free:
            return self._free.pop()
        for page_hash in self._places:
            if page_hash not in self._read:
                return self._places.pop(page_hash)
        return None

    def put(self, page_hash: PageHash, place: int) -> None:
        """Makes a taken place findable: it was written. Of two that are equal one comes free."""
        if page_hash in self._places:
            self._free.append(place)
        else:
            self._places[page_hash] = place

    def release(self, places: Iterable[int]) -> None:
        """Frees taken places: whatever is written there, nobody will look for it."""
        self._free.extend(places)

    def flush(self) -> None:
        """The plan at hand was made: later ones may write what it reads."""
        self._read.clear()

    def forget(self) -> None:
        """Frees all findable ones: what they hold can no longer be trusted."""
        self._free.extend(self._places.values())
        self._places.clear()
        self._read.clear()

    def check_integrity(self, taken: Iterable[int]) -> None:
        """Asserts that each place is free, findable or taken by one live sequence."""
        everywhere = [*self._free, *self._places.values(), *taken]
        assert sorted(everywhere) == list(range(self.num_places)), everywhere
