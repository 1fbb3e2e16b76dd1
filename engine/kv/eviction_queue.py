"""Cached pages without a holder, in the order in which they are evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

_FEW = 1024


class EvictionQueue:
    """Pages by how long they have had no holder. Nothing is searched, and leaving is free.

    A list that is read from its first end on, in which what stands for a page that was taken out
    from between stays until it comes up: of those that stand for one page the newest counts, if any
    does. Linking the pages to one another instead (an `OrderedDict`) costs several cache misses for
    each that comes or goes.

    Args:
        num_pages: ids are below this.
    """

    def __init__(self, num_pages: int) -> None:
        self._queue: list[int] = []
        self._first = 0
        self._is_in = bytearray(num_pages)
        self._popped: list[int] = []  # not noted yet as not being in
        self._num_void: dict[int, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, page: int) -> bool:
        self.flush()
        return self._is_in[page] > 0

    def __iter__(self) -> Iterator[int]:
        """The pages, first to be evicted first."""
        passed: dict[int, int] = {}
        for page in islice(self._queue, self._first, None):
            num_passed = passed.get(page, 0)
            if num_passed < self._num_void.get(page, 0):
                passed[page] = num_passed + 1
            else:
                yield page

    def extend(self, pages: Sequence[int]) -> None:
        """Puts pages last, as they come; none may be in the queue."""
        self.flush()
        is_in = self._is_in
        for page in pages:
            is_in[page] = 1
        self._queue.extend(pages)
        self._size += len(pages)
        if self._first > self._size + _FEW:
            del self._queue[: self._first]
            self._first = 0

    def remove(self, page: int) -> None:
        """Takes a page out, wherever it stands."""
        self.flush()
        assert self._is_in[page], page
        self._is_in[page] = 0
        self._size -= 1
        self._num_void[page] = self._num_void.get(page, 0) + 1
        if len(self._queue) - self._first > 2 * self._size + _FEW:
            self._queue, self._first = list(self), 0
            self._num_void.clear()

    def pop(self, num_pages: int) -> list[int]:
        """Takes out the first pages. There must be as many."""
        assert num_pages <= self._size, (num_pages, self._size)
        end = self._first + num_pages
        pages = self._queue[self._first : end]
        if self._num_void and not self._num_void.keys().isdisjoint(pages):
            pages, end = self._skip_void(num_pages)
        self._first = end
        self._popped += pages
        self._size -= num_pages
        return pages

    def _skip_void(self, num_pages: int) -> tuple[list[int], int]:
        """The first pages, and where those after them begin."""
        void, end = self._num_void, self._first
        pages: list[int] = []
        while len(pages) < num_pages:
            page = self._queue[end]
            end += 1
            num_void = void.pop(page, 0)
            if not num_void:
                pages.append(page)
            elif num_void > 1:
                void[page] = num_void - 1
        return pages, end

    def flush(self) -> None:
        """Notes which pages are not in the queue any more. Taking pages does not wait for it."""
        if self._popped:
            is_in = self._is_in
            for page in self._popped:
                is_in[page] = 0
            self._popped.clear()

    def clear(self) -> None:
        """Takes every page out."""
        self.flush()
        for page in self:
            self._is_in[page] = 0
        self._queue.clear()
        self._num_void.clear()
        self._first = self._size = 0
