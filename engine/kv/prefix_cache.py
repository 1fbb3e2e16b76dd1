"""Which page holds which prefix, and which unreferenced one to give up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from octavo.engine.kv.page_hash import PageHash


class PrefixCache:
    """An index from page hashes to pages, with the unreferenced pages in LRU order.

    It owns no page: the pool counts references, the manager keeps the two in step.

    Attributes:
        num_queried_tokens, num_hit_tokens: prompt tokens looked up and found, over all time.
    """

    def __init__(self) -> None:
        self._page_of: dict[PageHash, int] = {}
        self._hash_of: dict[int, PageHash] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, page: int) -> bool:
        """Whether `page` is registered."""
        return page in self._hash_of

    def find(self, page_hash: PageHash) -> int | None:
        """The page with this content, or None."""
        return self._page_of.get(page_hash)

    def register(self, page_hash: PageHash, page: int) -> bool:
        """Remembers a full page. False if another page with the same content is known already."""
        if page_hash in self._page_of:
            return False
        assert page not in self._hash_of, page
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        return True

    def mark_unreferenced(self, page: int) -> None:
        """Puts a registered page last in the order of eviction."""
        self._unreferenced[page] = None

    def mark_referenced(self, page: int) -> None:
        """Takes a page out of the order of eviction, if it is in it."""
        self._unreferenced.pop(page, None)

    def evict(self) -> int:
        """Forgets the page unreferenced for longest and returns it. There must be one."""
        page, _ = self._unreferenced.popitem(last=False)
        del self._page_of[self._hash_of.pop(page)]
        return page

    def forget_all(self) -> list[int]:
        """Forgets every page; returns those that were unreferenced."""
        pages = list(self._unreferenced)
        self._unreferenced.clear()
        self._page_of.clear()
        self._hash_of.clear()
        return pages

    def check_integrity(self, cached_pages: Iterable[int]) -> None:
        """Asserts that both directions agree and that just `cached_pages` may be evicted."""
        assert {page: key for key, page in self._page_of.items()} == self._hash_of
        assert set(self._unreferenced) == set(cached_pages)
        assert all(page in self._hash_of for page in self._unreferenced)
