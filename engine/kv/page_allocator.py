"""Takes pages from the pool: free ones, and those of the prefix cache where they run out."""

from __future__ import annotations

from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv.page_pool import PagePool
from octavo.engine.kv.prefix_cache import PrefixCache


class PageAllocator:
    """Gives out pages, each with one reference. There must be enough available.

    Args:
        pool: counts the pages.
        cache: forgets the prefixes whose pages are evicted, those unreferenced for longest first.
        run_pages: see `KVManager`.
        remembers_evicted: whether `take_evicted` is asked for evicted prefixes.
    """

    def __init__(
        self, pool: PagePool, cache: PrefixCache, run_pages: int, *, remembers_evicted: bool
    ) -> None:
        self.run_pages = run_pages
        self._pool = pool
        self._cache = cache
        self._remembers_evicted = remembers_evicted
        self._evicted: list[tuple[int, PageHash]] = []

    def allocate(self, num_pages: int) -> list[int]:
        """Pages for one sequence."""
        pool = self._pool
        num_lacking = num_pages - pool.num_free
        if num_lacking <= 0:
            return pool.allocate(num_pages)
        pages = self._evict(num_lacking)
        pages.reverse()
        if num_pages > num_lacking:
            pages += pool.allocate(num_pages - num_lacking)
        return pages

    def take(self, num_pages: int) -> list[int]:
        """Pages for as many sequences, one each.

        They are the pages that `KVManager.grow` would add if it were called for one sequence after
        the other. The caller adds them to the sequences' tables.
        """
        pool = self._pool
        num_free = pool.num_free
        new = pool.allocate(min(num_pages, num_free)) if num_free else []
        if num_pages > num_free:
            new += self._evict(num_pages - num_free)
        return new

    def take_after(self, last_pages: list[int]) -> list[int]:
        """As `take`, for the sequences with these last pages.

        Each gets the page that follows its last one if that is kept for it, and else the first of
        `run_pages` in a row as far as there are any.
        """
        pool, run = self._pool, self.run_pages
        if pool.num_cached:
            num_lacking = pool.num_without_run(last_pages) * run - pool.num_not_kept
            if num_lacking > 0:
                pool.reclaim(self._give_up(min(num_lacking, pool.num_cached)))
        return pool.allocate_each(last_pages, run)

    def take_evicted(self) -> list[tuple[int, PageHash]]:
        """Prefix pages evicted since the last call, and what they hold until they are written."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _evict(self, num_pages: int) -> list[int]:
        """Makes cached pages owned ones."""
        pages = self._give_up(num_pages)
        self._pool.take_over(pages)
        return pages

    def _give_up(self, num_pages: int) -> list[int]:
        """The cache's pages that were unreferenced for longest, which it forgets."""
        cache = self._cache
        if self._remembers_evicted:
            self._evicted += [
                (page, cache.hash_of(page)) for page in cache.next_to_evict(num_pages)
            ]
        return cache.evict(num_pages)
