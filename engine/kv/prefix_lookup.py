"""How much of a sequence need not be computed: the one question that estimates of work ask.

Caches of several groups answer it together: the longest prefix that every group can serve. One that
sees everything serves a prefix of which it has all pages, one with a window a prefix of which it
has the pages that the next query sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from octavo.engine.kv.host_tier import HostTier
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv.page_needs import PageNeeds
from octavo.engine.kv.prefix_cache import PrefixCache
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.kv.state_snapshots import StateSnapshots


class PrefixLookup:
    """Looks up prefixes without taking anything. An answer is an estimate: the exact match is made
    when a sequence is admitted.

    Args:
        cache: of the device's pages.
        host: of the host tier's.
        needs: the cache groups.
        snapshots: of recurrent states; None without recurrent layers.
    """

    def __init__(
        self,
        cache: PrefixCache,
        host: HostTier,
        needs: PageNeeds,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self._cache = cache
        self._host = host
        self._needs = needs
        self._snapshots = snapshots
        self._page_size = needs.page_size

    def most(self, pages: SequencePages) -> int:
        """Pages that a sequence can reuse at the most: its last known token is always computed."""
        if not pages.reads_cache:
            return 0
        num_pages = (pages.request.num_tokens - 1) // self._page_size
        return min(num_pages, len(pages.hashes))

    def num_full(self, pages: SequencePages) -> int:
        """Pages of a waiting sequence that it will make findable once it is computed."""
        return min(pages.request.num_tokens // self._page_size, len(pages.hashes))

    def on_device(self, pages: SequencePages, guess: int = 0) -> int:
        """First pages of a sequence that the device holds, and can go on from.

        Args:
            guess: how many it held before. As a hash covers all that is before it, only those
                about there are looked at.
        """
        num_pages = self._on_device(pages, guess)
        if self._snapshots is None:
            return num_pages
        return self._snapshots.longest(pages.hashes, num_pages)

    def _on_device(self, pages: SequencePages, guess: int) -> int:
        most, hashes, knows = self.most(pages), pages.hashes, self._cache.knows
        if not self._needs.is_plain:
            return self.num_served(pages.keys, most, is_on_host=bool(pages.host_pages))
        num_pages = min(guess, most)
        if num_pages and not knows(hashes[num_pages - 1]):
            low, num_pages = 0, num_pages - 1
            while low < num_pages:  # prefixes go from their end on
                middle = (low + num_pages + 1) // 2
                if knows(hashes[middle - 1]):
                    low = middle
                else:
                    num_pages = middle - 1
            return num_pages
        if num_pages < most and knows(hashes[num_pages]):
            num_pages += self._cache.num_matching(islice(hashes, num_pages, most))
        return num_pages

    def num_served(
        self, keys: Sequence[Sequence[PageHash]], most: int, *, is_on_host: bool = False
    ) -> int:
        """First pages, up to `most`, that every group can serve.

        Args:
            keys: names of the pages, by group.
            is_on_host: whether the groups with a window get theirs from the host.
        """
        num_whole, end = self._needs.num_whole, most
        for whole in keys[:num_whole]:
            end = min(end, self._cache.num_matching(islice(whole, end)))
        if is_on_host:
            return end if num_whole else 0
        self._cache.flush()
        while end and (missing := self._missing(keys, end)) is not None:
            end = missing
        return end

    def _missing(self, keys: Sequence[Sequence[PageHash]], end: int) -> int | None:
        """The last of the pages that a query after the first `end` pages sees which some group with
        a window lacks; None if none does."""
        needs, knows = self._needs, self._cache.may_know
        for window, names in zip(needs.windows, keys, strict=True):
            if window is not None:
                first = needs.first_seen(window, end * self._page_size)
                for index in range(end - 1, first - 1, -1):
                    if not knows(names[index]):
                        return index
        return None

    def on_host(self, pages: SequencePages, num_before: int) -> int:
        """Pages that the host holds of those that follow the first `num_before`.

        Evicted prefixes are looked for there only where one group sees everything.
        """
        if not self._host.num_cached or not self._needs.is_plain:
            return 0
        return len(self._host.longest_match(islice(pages.hashes, num_before, self.most(pages))))


def num_common(one: SequencePages, other: SequencePages, least: int, most: int) -> int:
    """Pages with which both sequences begin: at least `least`, counted up to `most`."""
    while least < most:
        middle = (least + most + 1) // 2
        if one.hashes[middle - 1] == other.hashes[middle - 1]:
            least = middle
        else:
            most = middle - 1
    return least


class Reuse(NamedTuple):
    """Pages of a waiting sequence that it need not compute.

    Attributes:
        num_device: first ones, which the device holds.
        num_led: of those and the ones that others are about to compute for it, all together.
        num_host: those after them that the host holds.
    """

    num_device: int = 0
    num_led: int = 0
    num_host: int = 0


NO_REUSE = Reuse()
