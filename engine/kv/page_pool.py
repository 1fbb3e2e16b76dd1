"""The KV pool's pages and their references: counts only, never a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

TRASH_PAGE = 0
"""The page that padded rows write to; no sequence ever owns it."""

_CACHED = -1
"""What stands for the number of references of a cached page."""


class PagePool:
    """Pages 1 … `num_pages` - 1, each free, owned, cached or in transfer.

    Owned pages carry a reference for each sequence that reads them; a page with one reference may
    be written by its owner. Cached pages have no reference but hold KV worth finding again; they
    count as available and are reclaimed when free ones run out. Pages in transfer are being filled
    from or copied to another memory and have no owner until that ends.

    The reference of a page that was taken is entered by `flush`, at the latest when references are
    asked for: taking pages does not wait for it.

    Free pages that follow a sequence's last one may be kept for its growth (`allocate_each`). They
    stay free, and are taken once there are no others.

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
        self._runs: dict[int, int] = {}  # page: the end of the free pages kept after it
        self._num_kept = 0  # free pages that are kept, and not in the list
        self._num_cached = 0
        self._in_transfer: set[int] = set()
        self._taken: list[int] = []  # owned once; their references are not entered yet

    @property
    def num_usable(self) -> int:
        """All pages but the trash page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free) + self._num_kept

    @property
    def num_not_kept(self) -> int:
        """Free pages that are not kept for a sequence."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_owned(self) -> int:
        # All that are nothing else: taking pages has one count less to keep.
        return self.num_usable - self.num_free - self._num_cached - len(self._in_transfer)

    @property
    def num_in_transfer(self) -> int:
        return len(self._in_transfer)

    @property
    def num_available(self) -> int:
        """Pages that an allocation may use: free ones, and cached ones once reclaimed."""
        return len(self._free) + self._num_kept + self._num_cached

    def num_references(self, page: int) -> int:
        """Sequences and runs that hold `page`."""
        self.flush()
        return max(0, self._num_references[page])

    def num_held(self, pages: Iterable[int]) -> int:
        """How many of `pages` have an owner."""
        self.flush()
        references = self._num_references
        return sum([1 for page in pages if references[page] > 0])

    def is_cached(self, page: int) -> bool:
        """Whether `page` is unreferenced and kept."""
        self.flush()
        return self._num_references[page] == _CACHED

    def allocate(self, num_pages: int) -> list[int]:
        """Takes free pages, with one reference each. There must be enough: see `reclaim`."""
        free = self._free
        if num_pages > len(free):
            self._give_up_runs()
        first = len(free) - num_pages
        assert 0 <= first <= len(free), (num_pages, len(free))
        pages = free[first:]
        pages.reverse()
        del free[first:]
        self._taken += pages
        return pages

    def allocate_each(self, last_pages: Iterable[int], run: int) -> list[int]:
        """Takes a free page for each of several sequences: the one after its last page, if it can.

        Args:
            last_pages: of the sequences.
            run: where a sequence's pages do not go on, it gets the first of up to so many free ones
                in a row, and the others are kept for when it grows again.
        """
        runs, free = self._runs, self._free
        taken: list[int] = []
        for last in last_pages:
            end = runs.pop(last, None)
            if end is not None:
                page = last + 1
                self._num_kept -= 1
            else:
                if not free:
                    self._give_up_runs()
                page = free.pop()
                end = page + 1
                while free and free[-1] == end < page + run:
                    free.pop()
                    end += 1
                self._num_kept += end - page - 1
            if end > page + 1:
                runs[page] = end
            taken.append(page)
        self._taken += taken
        return taken

    def num_without_run(self, last_pages: Iterable[int]) -> int:
        """Sequences with these last pages for which no page is kept."""
        runs = self._runs
        return sum([1 for last in last_pages if last not in runs])

    def give_up_run(self, page: int) -> None:
        """Keeps nothing after `page` any longer: what was kept is taken next."""
        end = self._runs.pop(page, None)
        if end is not None:
            self._free.extend(range(end - 1, page, -1))
            self._num_kept -= end - page - 1

    def _give_up_runs(self) -> None:
        for page in list(self._runs):
            self.give_up_run(page)

    def flush(self) -> None:
        """Enters the references of the pages that were taken."""
        if self._taken:
            references = self._num_references
            for page in self._taken:
                assert references[page] <= 0, f"page {page} was not there to be taken"
                references[page] = 1
            self._taken.clear()

    def share(self, pages: Iterable[int]) -> list[int]:
        """Adds a reference to each page, owned or cached; returns those that were cached."""
        self.flush()
        references = self._num_references
        revived: list[int] = []
        for page in pages:
            count = references[page]
            assert count, f"page {page} is free"
            if count == _CACHED:
                count = 0
                revived.append(page)
            references[page] = count + 1
        self._num_cached -= len(revived)
        return revived

    def release(self, pages: Iterable[int], contents: Sequence[object] | None = None) -> list[int]:
        """Drops one reference of each page.

        Args:
            pages: owned pages.
            contents: by page, None for those that become free with their last reference;
                others stay cached. Without it, all become free.

        Returns:
            The pages that are cached now, in the order given.
        """
        self.flush()
        references, free = self._num_references, self._free
        kept: list[int] = []
        for page in pages:
            count = references[page] - 1
            assert count >= 0, f"page {page} is not owned"
            references[page] = count
            if count:
                continue
            if contents is not None and contents[page] is not None:
                references[page] = _CACHED
                kept.append(page)
            else:
                free.append(page)
        self._num_cached += len(kept)
        return kept

    def reclaim(self, pages: Sequence[int]) -> None:
        """Makes cached pages free; the caller has forgotten their content."""
        self.flush()
        references = self._num_references
        for page in pages:
            assert references[page] == _CACHED, page
            references[page] = 0
        self._num_cached -= len(pages)
        self._free.extend(pages)

    def take_over(self, pages: Sequence[int]) -> None:
        """Gives cached pages one reference each, as if they were reclaimed and allocated again."""
        self._taken += pages
        self._num_cached -= len(pages)

    def begin_transfer(self, pages: Iterable[int]) -> None:
        """Takes pages with one reference from their owner until `end_transfer`."""
        self.flush()
        for page in pages:
            assert self._num_references[page] == 1, f"page {page} is shared or not owned"
            self._num_references[page] = 0
            self._in_transfer.add(page)

    def end_transfer(self, pages: Iterable[int], *, owned: bool) -> None:
        """Gives pages in transfer one reference again, or frees them."""
        for page in pages:
            self._in_transfer.remove(page)
            if owned:
                self._num_references[page] = 1
            else:
                self._free.append(page)

    def check_integrity(self) -> None:
        """Asserts that free + owned + cached + in transfer is every page, each exactly once."""
        self.flush()
        owned = {page for page, count in enumerate(self._num_references) if count > 0}
        cached = {page for page, count in enumerate(self._num_references) if count == _CACHED}
        assert min(self._num_references) >= _CACHED
        assert len(cached) == self._num_cached, (len(cached), self._num_cached)
        assert len(owned) == self.num_owned, (len(owned), self.num_owned)
        kept = [kept for page, end in self._runs.items() for kept in range(page + 1, end)]
        assert len(kept) == self._num_kept, (len(kept), self._num_kept)
        free = {*self._free, *kept}
        groups = (free, owned, cached, self._in_transfer)
        assert len(free) == self.num_free, "a page is free twice"
        assert sum(map(len, groups)) == self.num_usable, [len(group) for group in groups]
        assert set().union(*groups) == set(range(1, self.num_pages))
