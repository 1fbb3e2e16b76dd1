"""The cached prefixes that live sequences began with, each held once for all of them.

A tree of runs of pages:

    root ── pages 0 … 63, a system prompt that 200 sequences share
             ├── pages 64 … 70, a conversation that two of them go on with
             └── pages 64 … 65, another one

A sequence holds the run that its match ends with, a run the one that it goes on from, and the pool
counts a reference of a page for the run that it is in: one sequence more or less at a prefix of any
length changes one number.

Source: Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs" (radix
attention), NeurIPS 2024. Only what is held is in this tree; the rest is found by its hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import eq

from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv.page_pool import PagePool
from octavo.engine.kv.prefix_cache import PrefixCache


class PrefixRun:
    """Pages that follow one another in every sequence that holds them.

    One without holders is a match that no sequence was admitted with yet, and not in the tree.

    Args:
        before: the run that it goes on from; None for the root.
        page_ids: pages from the beginning of the sequences on: those of the runs before it, too.
        hashes: what those pages hold, in order; more may follow.

    Attributes:
        num_holders: sequences whose match ends with it, and runs that go on from it.
        after: the runs that go on from it, by what the first of their own pages holds.
    """

    __slots__ = ("after", "before", "hashes", "num_holders", "page_ids")

    def __init__(
        self, before: PrefixRun | None, page_ids: list[int], hashes: Sequence[PageHash]
    ) -> None:
        self.before = self if before is None else before
        self.page_ids = page_ids
        self.hashes = hashes
        self.num_holders = 0
        self.after: dict[PageHash, PrefixRun] = {}

    def __len__(self) -> int:
        return len(self.page_ids)

    @property
    def num_before(self) -> int:
        """Pages of the runs before it."""
        return len(self.before.page_ids)

    @property
    def own_page_ids(self) -> list[int]:
        """Its pages but for those of the runs before it."""
        return self.page_ids[self.num_before :]

    @property
    def key(self) -> PageHash:
        """What the first of its own pages holds."""
        return self.hashes[self.num_before]


class HeldPrefixes:
    """Finds prefixes, and holds them for the sequences that begin with them.

    Args:
        pool: counts a reference of a page for each run that it is in.
        cache: the index of all prefixes.
    """

    def __init__(self, pool: PagePool, cache: PrefixCache) -> None:
        self._pool = pool
        self._cache = cache
        self._root = _root()

    def match(self, hashes: Sequence[PageHash], num_pages: int) -> PrefixRun:
        """The longest cached prefix of up to `num_pages` pages with these contents.

        A hash covers all that is before it, so that of a run only the last one is looked at.
        Nothing is taken. A match is good for a `hold` until a sequence releases its own, or pages
        are evicted.
        """
        run, num_matched, cache = self._root, 0, self._cache
        while num_matched < num_pages:
            after = run.after.get(hashes[num_matched])
            if after is None:
                break
            end = len(after.page_ids)
            if end > num_pages or hashes[end - 1] != after.hashes[end - 1]:
                break
            run, num_matched = after, end
        if num_matched < num_pages and cache.may_know(hashes[num_matched]):
            others = cache.longest_match(islice(hashes, num_matched, num_pages))
            if others:
                return PrefixRun(run, run.page_ids + others, hashes)
        return run

    def num_held(self, run: PrefixRun) -> int:
        """How many of a match's pages any sequence holds."""
        if run.num_holders:
            return len(run.page_ids)
        return run.num_before + self._pool.num_held(run.own_page_ids)

    def hold(self, match: PrefixRun) -> PrefixRun:
        """One sequence more holds a prefix.

        Returns:
            What to `release` when it is done with it.
        """
        run = match if match.num_holders else self._enter(match)
        run.num_holders += 1
        return run

    def release(self, run: PrefixRun) -> None:
        """A sequence is done with a prefix; pages without any other holder stay cached.

        The end of a prefix is put up for eviction before its beginning.
        """
        run.num_holders -= 1
        while not run.num_holders:
            page_ids = reversed(run.own_page_ids)
            self._cache.mark_unreferenced(self._pool.release(page_ids, self._cache.contents))
            before = run.before
            del before.after[run.key]
            before.num_holders -= 1
            run = before

    def forget(self) -> None:
        """Finds none of its prefixes any more; they are held until they are released."""
        self._root = _root()

    def check_integrity(self, held: Iterable[PrefixRun]) -> Counter[int]:
        """Asserts that the runs are held by just these, one for each sequence, and one another.

        Returns:
            How many runs each page is in.
        """
        num_holders: Counter[PrefixRun] = Counter()
        for run in held:
            while True:
                num_holders[run] += 1
                if num_holders[run] > 1 or run.before is run:
                    break
                run = run.before
        page_ids: Counter[int] = Counter()
        for run, count in num_holders.items():
            if run.before is run:
                continue  # a root
            assert run.num_holders == count, (run.page_ids, run.num_holders, count)
            assert run.page_ids[: run.num_before] == run.before.page_ids
            assert run.before.after[run.key] is run
            page_ids.update(run.own_page_ids)
        assert self._root.num_holders == 1 + num_holders[self._root]
        for run in self._root.after.values():
            assert run in num_holders
        return page_ids

    def _enter(self, match: PrefixRun) -> PrefixRun:
        """Puts a match into the tree, or finds it there."""
        while (other := match.before.after.get(match.key)) is not None:
            num_common = sum(map(eq, match.page_ids, other.page_ids))
            if num_common < len(other):
                other = _split(other, num_common)
            if num_common == len(match):
                return other
            match.before = other
        match.before.after[match.key] = match
        match.before.num_holders += 1
        self._cache.mark_referenced(self._pool.share(match.own_page_ids))
        return match


def _root() -> PrefixRun:
    root = PrefixRun(None, [], ())
    root.num_holders = 1  # it is never released
    return root


def _split(run: PrefixRun, num_pages: int) -> PrefixRun:
    """Makes two runs of one; returns the first, which ends after `num_pages` pages."""
    first = PrefixRun(run.before, run.page_ids[:num_pages], run.hashes)
    first.before.after[first.key] = first
    run.before = first
    first.after[run.key] = run
    first.num_holders = 1
    return first
