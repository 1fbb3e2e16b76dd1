"""Which page holds which prefix, and which unreferenced one is evicted first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from octavo.engine.kv.cache_events import CacheEvents
from octavo.engine.kv.eviction_queue import EvictionQueue
from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv.page_watch import PageWatch


class PrefixCache:
    """An index from page hashes to pages, with the unreferenced pages in LRU order.

    It owns no page: the pool counts references, the manager keeps the two in step.

    What an evicted page held is forgotten by `flush`, at the latest when anything is looked for
    that might be found by mistake. Forgetting takes longer than evicting, and a plan that needs a
    page does not wait for it.

    Args:
        num_pages: of the pool.
        watch: notified of pages that can be found from now on, or no longer.

    Attributes:
        num_queried_tokens, num_hit_tokens: prompt tokens looked up and found, over all time.
        events: notified of pages that can be found no longer; None without followers.
    """

    def __init__(self, num_pages: int, watch: PageWatch | None = None) -> None:
        self._watch = PageWatch() if watch is None else watch
        self._page_of: dict[PageHash, int] = {}
        self._hash_of: list[PageHash | None] = [None] * num_pages
        self._unreferenced = EvictionQueue(num_pages)
        self._given_up: list[int] = []
        self.events: CacheEvents | None = None
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def __len__(self) -> int:
        return len(self._page_of) - len(self._given_up)

    def __contains__(self, page: int) -> bool:
        """Whether `page` is registered."""
        self.flush()
        return self._hash_of[page] is not None

    @property
    def contents(self) -> Sequence[PageHash | None]:
        """What each registered page holds, by page; None for the others."""
        self.flush()
        return self._hash_of

    def may_know(self, page_hash: PageHash) -> bool:
        """False if no page has this content; `longest_match` knows for sure."""
        return page_hash in self._page_of

    def knows(self, page_hash: PageHash) -> bool:
        """Whether a page with this content can be found."""
        page = self._page_of.get(page_hash)
        return page is not None and not (self._given_up and page in self._given_up)

    def find(self, page_hash: PageHash) -> int | None:
        """The page with this content; None if none can be found."""
        return self._page_of[page_hash] if self.knows(page_hash) else None

    def num_matching(self, hashes: Iterable[PageHash]) -> int:
        """How many pages `longest_match` finds."""
        return len(self.longest_match(hashes))

    def longest_match(self, hashes: Iterable[PageHash]) -> list[int]:
        """The pages with these contents, up to the first that is not known."""
        find = map(self._page_of.get, hashes).__next__
        pages: list[int] = list(iter(find, None))  # None ends it
        if self._given_up and pages:
            given_up = set(self._given_up)
            if not given_up.isdisjoint(pages):
                del pages[next(i for i, page in enumerate(pages) if page in given_up) :]
        return pages

    def register(self, page_hash: PageHash, page: int) -> bool:
        """Remembers a full page. False if another page with the same content is known already.

        That other page was asked for, in a way: if it has no holder, it goes last in the order of
        eviction.
        """
        self.flush()
        known = self._page_of.get(page_hash)
        if known is not None:
            if known in self._unreferenced:
                self._unreferenced.remove(known)
                self._unreferenced.extend((known,))
            return False
        assert self._hash_of[page] is None, page
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        self._watch.note((page_hash,))
        return True

    def register_all(self, hashes: Sequence[PageHash], pages: Sequence[int]) -> None:
        """Remembers the full pages of a sequence, in its order, as `register` does each."""
        self.flush()
        if self._page_of.keys().isdisjoint(hashes):
            self._page_of.update(zip(hashes, pages, strict=True))
            hash_of = self._hash_of
            for page_hash, page in zip(hashes, pages, strict=True):
                assert hash_of[page] is None, page
                hash_of[page] = page_hash
            self._watch.note(hashes)
            return
        for page_hash, page in zip(hashes, pages, strict=True):
            self.register(page_hash, page)

    def mark_unreferenced(self, pages: Sequence[int]) -> None:
        """Puts registered pages last in the order of eviction, as they come."""
        self._unreferenced.extend(pages)

    def mark_referenced(self, pages: Iterable[int]) -> None:
        """Takes unreferenced pages out of the order of eviction."""
        for page in pages:
            self._unreferenced.remove(page)

    def hash_of(self, page: int) -> PageHash:
        """The content of a registered page."""
        page_hash = self._hash_of[page]
        assert page_hash is not None, page
        return page_hash

    def next_to_evict(self, num_pages: int) -> list[int]:
        """The pages unreferenced for longest, which `evict` would return."""
        return list(islice(self._unreferenced, num_pages))

    def evict(self, num_pages: int) -> list[int]:
        """Evicts the pages unreferenced for longest and returns them. There must be enough."""
        pages = self._unreferenced.pop(num_pages)
        self._given_up += pages
        return pages

    def flush(self) -> None:
        """Forgets what the evicted pages held."""
        if not self._given_up:
            return
        hash_of, page_of = self._hash_of, self._page_of
        hashes: list[PageHash] = [hash_of[page] for page in self._given_up]  # type: ignore[misc]
        for page, page_hash in zip(self._given_up, hashes, strict=True):
            del page_of[page_hash]  # all of them are registered
            hash_of[page] = None
        self._watch.note(hashes)
        if self.events is not None:
            self.events.removed(hashes)
        self._given_up.clear()
        self._unreferenced.flush()

    def forget_all(self) -> list[int]:
        """Forgets every page; returns those that were unreferenced."""
        self.flush()
        pages = list(self._unreferenced)
        self._unreferenced.clear()
        for page in self._page_of.values():
            self._hash_of[page] = None
        self._page_of.clear()
        self._watch.note_all()
        if self.events is not None:
            self.events.cleared()
        return pages

    def check_integrity(self, cached_pages: Iterable[int]) -> None:
        """Asserts that both directions agree and that just `cached_pages` may be evicted."""
        self.flush()
        hash_of = {page: key for page, key in enumerate(self._hash_of) if key is not None}
        assert {page: key for key, page in self._page_of.items()} == hash_of
        unreferenced = list(self._unreferenced)
        assert len(unreferenced) == len(self._unreferenced)
        assert sorted(unreferenced) == sorted(cached_pages)
        assert all(page in self._unreferenced and page in self for page in unreferenced)
