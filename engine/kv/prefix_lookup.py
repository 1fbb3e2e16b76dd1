"""How much of a sequence need not be computed: the exact match at admission, and estimates of it.

Caches of several groups answer it together: the longest prefix that every group can serve. One that
sees everything serves a prefix of which it has all pages, one with a window a prefix of which it
has the pages that the next query sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from octavo.engine.kv.held_prefixes import HeldPrefixes, PrefixRun
from octavo.engine.kv.host_tier import HostTier
from octavo.engine.kv.page_hash import PageHash, group_names, page_hashes, root_hash
from octavo.engine.kv.page_needs import PageNeeds
from octavo.engine.kv.prefix_cache import PrefixCache
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.kv.state_snapshots import StateSnapshots


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest prefix of a sequence that every group can serve. Nothing is taken.

    It is valid for `KVManager.admit` until a sequence releases its pages, or pages are evicted.

    Attributes:
        runs: of each group that sees everything, its pages.
        seen: of each group with a window, in their order, those of its last pages that the next
            query sees.
        num_pages: how long the prefix is, in pages.
        resumes_at: the first position that is computed once the sequence is there: the end of the
            prefix, or what the host brings back.
        num_found: pages that were found, those counted that lie behind the last snapshot of a
            recurrent state.
    """

    runs: tuple[PrefixRun, ...]
    seen: tuple[list[int], ...]
    num_pages: int
    resumes_at: int
    num_found: int = 0

    def __len__(self) -> int:
        return self.num_pages

    @property
    def page_ids(self) -> list[int]:
        """The first group's pages."""
        return self.runs[0].page_ids if self.runs else self.seen[0]


class PrefixLookup:
    """Looks up prefixes without taking anything. `match` is exact and made when a sequence is
    admitted; the other answers are estimates.

    Args:
        prefixes: those that live sequences began with.
        cache: of the device's pages.
        host: of the host tier's.
        needs: the cache groups.
        snapshots: of recurrent states; None without recurrent layers.
    """

    def __init__(
        self,
        prefixes: HeldPrefixes,
        cache: PrefixCache,
        host: HostTier,
        needs: PageNeeds,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._cache = cache
        self._host = host
        self._needs = needs
        self._snapshots = snapshots
        self._page_size = needs.page_size

    def match(self, pages: SequencePages, num_tokens: int | None = None) -> PrefixMatch:
        """The cached pages that the request's known tokens begin with.

        At least the last known token is left to compute. A request that wants its prompt's
        log-probabilities, or hidden states, computes every token. A swapped sequence looks only
        for pages of groups that see everything: those in windows come back from the host.

        Args:
            num_tokens: how many tokens are known, if the caller knows that already.
        """
        if num_tokens is None:
            num_tokens = pages.request.num_tokens
        most = (num_tokens - 1) // self._page_size if pages.reads_cache else 0
        if len(pages.hashes) < most:
            pages.name(most)
        match, size, needs = self._prefixes.match, self._page_size, self._needs
        if needs.is_plain:
            run = match(pages.hashes, most)
            num_found = end = len(run.page_ids)
            if self._snapshots is not None:
                end = self._snapshots.longest(pages.hashes, num_found)
                run = match(pages.hashes, end)
            resumes_at = max(end * size, pages.num_host_tokens)
            return PrefixMatch((run,), (), end, resumes_at, num_found)
        is_on_host = bool(pages.host_pages)
        if is_on_host:
            most = min(most, pages.num_host_tokens // size)
        end = self.num_served(pages.keys, most, is_on_host=is_on_host)
        seen: list[list[int]] = []
        for window, names in zip(needs.windows, pages.keys, strict=True):
            if window is not None:
                first = end if is_on_host else needs.first_seen(window, end * size)
                seen.append(self._cache.longest_match(islice(names, first, end)))
        runs = tuple(match(names, end) for names in pages.keys[: needs.num_whole])
        return PrefixMatch(runs, tuple(seen), end, max(end * size, pages.num_host_tokens))

    def host_match(self, pages: SequencePages, num_matched: int) -> list[int]:
        """Host pages that go on where the first `num_matched` pages found on the device end.

        Asked right after `match`; empty unless bringing them back is the cheaper way. Only where
        one group sees everything.
        """
        if not self._host.num_cached or not pages.reads_cache or not self._needs.is_plain:
            return []
        num_pages = (pages.request.num_tokens - 1) // self._page_size
        return self._host.longest_match(islice(pages.hashes, num_matched, num_pages))

    def num_cached_tokens(
        self, token_ids: Sequence[int], *, tenant: str = "", cache_salt: str = ""
    ) -> int:
        """Tokens of a prompt that the device's prefix cache holds now."""
        if not len(self._cache):
            return 0
        num_tokens = (len(token_ids) - 1) // self._page_size * self._page_size
        root = root_hash(tenant, cache_salt)
        hashes = page_hashes(root, token_ids[:num_tokens], self._page_size)
        keys = [group_names(hashes, group) for group in range(self._needs.num_groups)]
        num_pages = self.num_served(keys, len(hashes))
        if self._snapshots is not None:
            num_pages = self._snapshots.longest(hashes, num_pages)
        return num_pages * self._page_size

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
