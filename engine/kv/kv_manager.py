"""Pages for sequences: allocation, sharing by prefix, release."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from octavo.engine.kv.page_hash import page_hashes, root_hash
from octavo.engine.kv.page_pool import TRASH_PAGE, PagePool
from octavo.engine.kv.prefix_cache import PrefixCache
from octavo.engine.kv.sequence_pages import SequencePages
from octavo.engine.request import Request


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
        """An empty set of pages for `request`.

        The prompt's pages are hashed now, and never while a step is planned.
        """
        pages = SequencePages(
            request=request,
            root=root_hash(request.tenant, request.cache_salt),
        )
        if self.enable_prefix_caching:
            self._extend_hashes(pages, request.num_prompt_tokens // self.page_size)
        return pages

    def match_prefix(self, pages: SequencePages) -> list[int]:
        """The cached pages that the request's known tokens begin with; nothing is taken.

        At least the last known token is left to compute. A request that wants its prompt's
        log-probabilities computes every token.
        """
        request = pages.request
        if not self._reads_cache(request):
            return []
        num_pages = (request.num_tokens - 1) // self.page_size
        self._extend_hashes(pages, num_pages)
        return self.cache.longest_match(islice(pages.hashes, num_pages))

    def count_query(self, request: Request, num_hit_tokens: int) -> None:
        """Counts a request's look-up once, when it is first admitted."""
        if self._reads_cache(request):
            self.cache.num_queried_tokens += request.num_tokens
            self.cache.num_hit_tokens += num_hit_tokens

    def num_pages_to_take(self, matched: list[int], num_tokens: int) -> int:
        """Available pages that `admit` would use: new ones, and matched ones nobody holds now."""
        return self.num_pages_for(num_tokens) - self.pool.num_held(matched)

    def admit(self, pages: SequencePages, matched: list[int], num_tokens: int) -> None:
        """Gives a sequence without pages the matched ones and new ones for `num_tokens` in all.

        `num_pages_to_take` of them must be available.
        """
        assert not pages.page_ids, pages.request.request_id
        self.cache.mark_referenced(self.pool.share(matched))
        pages.page_ids.extend(matched)
        pages.capacity = len(matched) * self.page_size
        pages.num_registered = len(matched)
        self.grow(pages, num_tokens)

    def grow(self, pages: SequencePages, num_tokens: int) -> list[int]:
        """Adds pages until the sequence has room for `num_tokens`; they must be available.

        Returns:
            The pages added.
        """
        num_new = self.num_pages_for(num_tokens) - len(pages.page_ids)
        if num_new <= 0:
            return []
        pool = self.pool
        if pool.num_free < num_new:
            pool.reclaim(self.cache.evict(num_new - pool.num_free))
        new = pool.allocate(num_new)
        pages.page_ids.extend(new)
        pages.capacity += num_new * self.page_size
        return new

    def register_full_pages(self, pages: SequencePages, num_committed: int) -> None:
        """Makes findable the pages that the first `num_committed` tokens fill."""
        num_full = num_committed // self.page_size
        if num_full <= pages.num_registered or not self.enable_prefix_caching:
            return
        self._extend_hashes(pages, num_full)
        for index in range(pages.num_registered, num_full):
            self.cache.register(pages.hashes[index], pages.page_ids[index])
        pages.num_registered = num_full

    def release(self, pages: SequencePages) -> None:
        """Takes every page from the sequence; registered ones stay cached.

        The end of a prefix is put up for eviction before its beginning.
        """
        self.cache.mark_unreferenced(self.pool.release(reversed(pages.page_ids), self.cache))
        pages.page_ids.clear()
        pages.capacity = 0
        pages.num_registered = 0

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: what the pages hold can no longer be trusted."""
        self.pool.reclaim(self.cache.forget_all())

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
        hashes, size = pages.hashes, self.page_size
        num_hashed = len(hashes)
        if num_hashed < num_pages:
            parent = hashes[-1] if hashes else pages.root
            tokens = pages.tokens(num_hashed * size, num_pages * size)
            hashes.extend(page_hashes(parent, tokens, size))
