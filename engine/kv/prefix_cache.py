"""Which page holds which prefix, and which unreferenced one to give up first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from itertools import islice

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

    def __contains__(self, page: object) -> bool:
        """Whether `page` is registered."""
        return page in self._hash_of

    @property
    def registered(self) -> Container[int]:
        """The registered pages."""
        return self._hash_of

    def longest_match(self, hashes: Iterable[PageHash]) -> list[int]:
        """The pages with these contents, up to the first that is not known."""
        find = self._page_of.get
        pages: list[int] = []
        for page_hash in hashes:
            page = find(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def register(self, page_hash: PageHash, page: int) -> bool:
        """Remembers a full page. False if another page with the same content is known already.

        That other page was asked for, in a way: if nobody holds it, it goes last in the order of
        eviction.
        """
        known = self._page_of.get(page_hash)
        if known is not None:
            if known in self._unreferenced:
                self._unreferenced.move_to_end(known)
            return False
        assert page not in self._hash_of, page
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        return True

    def register_all(self, hashes: Sequence[PageHash], pages: Sequence[int]) -> None:
        """Remembers the full pages of a sequence, in its order, as `register` does each."""
        if self._page_of.keys().isdisjoint(hashes):
            assert self._hash_of.keys().isdisjoint(pages), pages
            self._page_of.update(zip(hashes, pages, strict=True))
            self._hash_of.update(zip(pages, hashes, strict=True))
            return
        for page_hash, page in zip(hashes, pages, strict=True):
            self.register(page_hash, page)

    def mark_unreferenced(self, pages: Iterable[int]) -> None:
        """Puts registered pages last in the order of eviction, as they come."""
        unreferenced = self._unreferenced
        for page in pages:  # an `OrderedDict` takes three times as long for `update`
            unreferenced[page] = None

    def mark_referenced(self, pages: Iterable[int]) -> None:
        """Takes unreferenced pages out of the order of eviction."""
        for page in pages:
            del self._unreferenced[page]

    def hash_of(self, page: int) -> PageHash:
        """The content of a registered page."""
        return self._hash_of[page]

    def next_to_evict(self, num_pages: int) -> list[int]:
        """The pages unreferenced for longest, which `evict` would return."""
        return list(islice(self._unreferenced, num_pages))

    def evict(self, num_pages: int) -> list[int]:
        """Forgets the pages unreferenced for longest and returns them. There must be enough."""
        pop, take_hash, page_of = self._unreferenced.popitem, self._hash_of.pop, self._page_of
        pages = [pop(False)[0] for _ in range(num_pages)]
        for page in pages:
            del page_of[take_hash(page)]
        return pages

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
