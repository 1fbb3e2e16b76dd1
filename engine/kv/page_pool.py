"""Who has which page of the KV pool: counts and references, never a tensor."""

from __future__ import annotations

from collections.abc import Iterable

TRASH_PAGE = 0
"""The page that padded rows write to; no sequence ever owns it."""


class PagePool:
    """Pages 1 … `num_pages` - 1, each free, owned, cached or in transfer.

    Owned pages carry a reference for each sequence that reads them; a page with one reference may
    be written by its owner. Cached pages have no reference but hold KV worth finding again; they
    count as available and are reclaimed when free ones run out. Pages in transfer are being filled
    from or copied to another memory and belong to nobody until that ends.

    Args:
        num_pages: pages in the pool, the trash page included; ≥ 2.
        page_size: tokens in a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages >= 2, num_pages
        assert page_size >= 1, page_size
        self.num_pages = num_pages
        self.page_size = page_size
        self._num_references = [0] * num_pages
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
        self._cached: set[int] = set()
        self._in_transfer: set[int] = set()
        self._num_owned = 0

    @property
    def num_usable(self) -> int:
        """All pages but the trash page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return self._num_owned

    @property
    def num_in_transfer(self) -> int:
        return len(self._in_transfer)

    @property
    def num_available(self) -> int:
        """Pages that an allocation may use: free ones, and cached ones once reclaimed."""
        return len(self._free) + len(self._cached)

    def num_references(self, page: int) -> int:
        """Sequences that hold `page`."""
        return self._num_references[page]

    def is_cached(self, page: int) -> bool:
        """Whether `page` is unreferenced and kept."""
        return page in self._cached

    def allocate(self) -> int:
        """Takes a free page, with one reference. There must be one: see `reclaim`."""
        page = self._free.pop()
        self._num_references[page] = 1
        self._num_owned += 1
        return page

    def share(self, page: int) -> None:
        """Adds a reference to an owned page, or revives a cached one."""
        if self._num_references[page] == 0:
            self._cached.remove(page)
            self._num_owned += 1
        self._num_references[page] += 1

    def release(self, page: int, *, keep: bool = False) -> bool:
        """Drops one reference; says whether it was the last.

        Args:
            page: an owned page.
            keep: whether an unreferenced page stays cached instead of becoming free.
        """
        references = self._num_references[page] - 1
        assert references >= 0, f"page {page} is not owned"
        self._num_references[page] = references
        if references:
            return False
        self._num_owned -= 1
        if keep:
            self._cached.add(page)
        else:
            self._free.append(page)
        return True

    def reclaim(self, page: int) -> None:
        """Makes a cached page free; whoever remembered its content must forget it."""
        self._cached.remove(page)
        self._free.append(page)

    def begin_transfer(self, pages: Iterable[int]) -> None:
        """Takes pages with one reference from their owner until `end_transfer`."""
        for page in pages:
            assert self._num_references[page] == 1, f"page {page} is shared or not owned"
            self._num_references[page] = 0
            self._num_owned -= 1
            self._in_transfer.add(page)

    def end_transfer(self, pages: Iterable[int], *, owned: bool) -> None:
        """Gives pages in transfer one reference again, or frees them."""
        for page in pages:
            self._in_transfer.remove(page)
            if owned:
                self._num_references[page] = 1
                self._num_owned += 1
            else:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Asserts that free + owned + cached + in transfer is every page, each exactly once."""
        owned = {page for page, count in enumerate(self._num_references) if count}
        assert all(count >= 0 for count in self._num_references)
        assert len(owned) == self._num_owned, (len(owned), self._num_owned)
        groups = (set(self._free), owned, self._cached, self._in_transfer)
        assert len(groups[0]) == len(self._free), "a page is free twice"
        assert sum(map(len, groups)) == self.num_usable, [len(group) for group in groups]
        assert set().union(*groups) == set(range(1, self.num_pages))
