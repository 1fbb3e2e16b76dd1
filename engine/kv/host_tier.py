"""Which page of host memory holds what: swapped sequences, and prefixes that were evicted.

Bookkeeping alone; the executor moves the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from octavo.engine.kv.page_hash import PageHash
from octavo.engine.kv.page_watch import PageWatch


class HostTier:
    """Pages 0 … `num_pages` - 1 of host memory, each free, owned or cached.

    Owned pages belong to a swapped sequence or to a transfer. Cached pages hold evicted prefixes
    and give way to anything else, least recently used first. A page that is being read by a
    transfer is pinned: it keeps its content until the transfer has ended.

    Args:
        num_pages: the tier's size, from its byte limit; 0 turns it off.
        watch: notified of cached pages that can be found from now on, or no longer.
    """

    def __init__(self, num_pages: int, watch: PageWatch | None = None) -> None:
        self._watch = PageWatch() if watch is None else watch
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: set[int] = set()
        self._hash_of: OrderedDict[int, PageHash] = OrderedDict()
        self._page_of: dict[PageHash, int] = {}
        self._num_readers: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_owned(self) -> int:
        return len(self._owned)

    @property
    def num_cached(self) -> int:
        return len(self._hash_of)

    @property
    def num_available(self) -> int:
        """Pages that an allocation may use: free ones, and cached ones that are not being read."""
        return len(self._free) + len(self._hash_of) - len(self._num_readers)

    def allocate(self, num_pages: int) -> list[int] | None:
        """Takes pages, from the cached ones if need be; None if there are not enough."""
        if num_pages > self.num_available:
            return None
        while len(self._free) < num_pages:
            page = next(page for page in self._hash_of if page not in self._num_readers)
            self._forget(page)
        pages = [self._free.pop() for _ in range(num_pages)]
        self._owned.update(pages)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Frees owned pages."""
        for page in pages:
            self._owned.remove(page)
            self._free.append(page)

    def remember(self, page: int, page_hash: PageHash) -> None:
        """Turns an owned page into a cached one; frees it if its content is known already."""
        self._owned.remove(page)
        if page_hash in self._page_of:
            self._free.append(page)
            return
        self._page_of[page_hash] = page
        self._hash_of[page] = page_hash
        self._watch.note((page_hash,))

    def __contains__(self, page_hash: object) -> bool:
        """Whether an evicted prefix page is here."""
        return page_hash in self._page_of

    def find(self, page_hash: PageHash) -> int | None:
        """The cached page with this content; None if it is not here."""
        return self._page_of.get(page_hash)

    def longest_match(self, hashes: Iterable[PageHash]) -> list[int]:
        """The cached pages with these contents, up to the first that is not known."""
        pages: list[int] = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def begin_read(self, pages: Sequence[int]) -> None:
        """Pins cached pages, which are the most recently used from now on."""
        for page in pages:
            self._num_readers[page] = self._num_readers.get(page, 0) + 1
            self._hash_of.move_to_end(page)

    def end_read(self, pages: Iterable[int]) -> None:
        """Takes back one pin of each page."""
        for page in pages:
            left = self._num_readers[page] - 1
            if left:
                self._num_readers[page] = left
            else:
                del self._num_readers[page]

    def forget_prefixes(self) -> None:
        """Drops every cached page that is not being read."""
        for page in [page for page in self._hash_of if page not in self._num_readers]:
            self._forget(page)

    def _forget(self, page: int) -> None:
        page_hash = self._hash_of.pop(page)
        del self._page_of[page_hash]
        self._free.append(page)
        self._watch.note((page_hash,))

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Asserts that free + owned + cached is every page once, and that `owned` are the owned."""
        owned = list(owned)
        assert len(set(owned)) == len(owned), "a host page has two owners"
        assert set(owned) == self._owned, (sorted(owned), sorted(self._owned))
        groups = (set(self._free), self._owned, set(self._hash_of))
        assert len(groups[0]) == len(self._free), "a host page is free twice"
        assert sum(map(len, groups)) == self.num_pages
        assert set().union(*groups) == set(range(self.num_pages))
        assert {page_hash: page for page, page_hash in self._hash_of.items()} == self._page_of
        assert self._num_readers.keys() <= self._hash_of.keys()
