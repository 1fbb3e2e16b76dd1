"""Pages for sequences: allocation, sharing by prefix, release."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

from octavo.engine.kv.page_hash import page_hash, root_hash
from octavo.engine.kv.page_pool import TRASH_PAGE, PagePool
from octavo.engine.kv.prefix_cache import PrefixCache
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.request import Request

_NEVER = sys.maxsize


class KVManager:
    """The one owner of the page pool and the prefix cache.

    A full page becomes findable when the step that wrote its last token was committed, and stays
    findable after its sequence let go of it until the page is needed for something else.

    Args:
        num_pages: pages in the pool, the trash page included.
        page_size: tokens in a page.
        enable_prefix_caching: whether full pages are shared and kept.
    """

    def __init__(self, *, num_pages: int, page_size: int, enable_prefix_caching: bool) -> None:
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = PagePool(num_pages, page_size)
        self.cache = PrefixCache()

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now."""
        return self.pool.num_available

    @property
    def usage(self) -> float:
        """Share of the pool that live sequences hold, 0 to 1."""
        return self.pool.num_owned / self.pool.num_usable

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def open(self, request: Request) -> SequencePages:
        """An empty set of pages for `request`."""
        return SequencePages(
            request=request,
            root=root_hash(request.tenant, request.cache_salt),
            next_registration=self.page_size if self.enable_prefix_caching else _NEVER,
        )

    def match_prefix(self, pages: SequencePages) -> list[int]:
        """The cached pages that the request's known tokens begin with; nothing is taken.

        At least the last known token is left to compute. A request that wants its prompt's
        log-probabilities computes every token.
        """
        request = pages.request
        if not self._reads_cache(request):
            return []
        matched: list[int] = []
        for index in range((request.num_tokens - 1) // self.page_size):
            self._extend_hashes(pages, index + 1)
            page = self.cache.find(pages.hashes[index])
            if page is None:
                break
            matched.append(page)
        return matched

    def count_query(self, request: Request, num_hit_tokens: int) -> None:
        """Counts a request's look-up once, when it is first admitted."""
        if self._reads_cache(request):
            self.cache.num_queried_tokens += request.num_tokens
            self.cache.num_hit_tokens += num_hit_tokens

    def num_pages_to_take(self, matched: list[int], num_tokens: int) -> int:
        """Available pages that `admit` would use: new ones, and matched ones nobody holds now."""
        num_held = sum(1 for page in matched if self.pool.num_references(page))
        return self.num_pages_for(num_tokens) - num_held

    def admit(self, pages: SequencePages, matched: list[int], num_tokens: int) -> None:
        """Gives a sequence without pages the matched ones and new ones for `num_tokens` in all.

        `num_pages_to_take` of them must be available.
        """
        assert not pages.page_ids, pages.request.request_id
        for page in matched:
            self.pool.share(page)
            self.cache.mark_referenced(page)
        pages.page_ids.extend(matched)
        pages.capacity = len(matched) * self.page_size
        pages.num_registered = len(matched)
        if self.enable_prefix_caching:
            pages.next_registration = (len(matched) + 1) * self.page_size
        self.grow(pages, num_tokens)

    def grow(self, pages: SequencePages, num_tokens: int) -> None:
        """Adds pages until the sequence has room for `num_tokens`; they must be available."""
        pool = self.pool
        while pages.capacity < num_tokens:
            if not pool.num_free:
                pool.reclaim(self.cache.evict())
            pages.page_ids.append(pool.allocate())
            pages.capacity += self.page_size

    def register_full_pages(self, pages: SequencePages, num_committed: int) -> None:
        """Makes findable the pages that the first `num_committed` tokens fill.

        Cheap to skip: there is nothing to do while `num_committed` < `pages.next_registration`.
        """
        if num_committed < pages.next_registration:
            return
        num_full = num_committed // self.page_size
        self._extend_hashes(pages, num_full)
        for index in range(pages.num_registered, num_full):
            self.cache.register(pages.hashes[index], pages.page_ids[index])
        pages.num_registered = num_full
        pages.next_registration = (num_full + 1) * self.page_size

    def release(self, pages: SequencePages) -> None:
        """Takes every page from the sequence; registered ones stay cached.

        The end of a prefix is put up for eviction before its beginning.
        """
        for page in reversed(pages.page_ids):
            keep = page in self.cache
            if self.pool.release(page, keep=keep) and keep:
                self.cache.mark_unreferenced(page)
        pages.page_ids.clear()
        pages.capacity = 0
        pages.num_registered = 0
        if self.enable_prefix_caching:
            pages.next_registration = self.page_size

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: what the pages hold can no longer be trusted."""
        for page in self.cache.forget_all():
            self.pool.reclaim(page)

    def check_integrity(self, live: Iterable[SequencePages]) -> None:
        """Asserts that pool, cache and the pages of all live sequences agree."""
        self.pool.check_integrity()
        live = list(live)
        held = Counter(page for pages in live for page in pages.page_ids)
        assert TRASH_PAGE not in held
        assert len(held) == self.pool.num_owned, (len(held), self.pool.num_owned)
        for page, count in held.items():
            assert self.pool.num_references(page) == count, page
        cached = [page for page in range(self.pool.num_pages) if self.pool.is_cached(page)]
        self.cache.check_integrity(cached)
        for pages in live:
            assert len(set(pages.page_ids)) == len(pages.page_ids)
            assert pages.capacity == len(pages.page_ids) * self.page_size
            for page in pages.page_ids[pages.num_registered :]:
                assert held[page] == 1, f"page {page} may be written and has {held[page]} owners"

    def _reads_cache(self, request: Request) -> bool:
        return self.enable_prefix_caching and request.sampling_params.prompt_logprobs is None

    def _extend_hashes(self, pages: SequencePages, num_pages: int) -> None:
        size = self.page_size
        hashes = pages.hashes
        for index in range(len(hashes), num_pages):
            parent = hashes[-1] if hashes else pages.root
            hashes.append(page_hash(parent, pages.tokens(index * size, (index + 1) * size)))
