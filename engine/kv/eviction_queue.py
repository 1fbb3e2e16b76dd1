"""Cached pages that nobody holds, in the order in which they are given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

_FEW = 1024


class EvictionQueue:
    """Pages by how long nobody has held them. Nothing is searched, and leaving costs nothing now.

    A plain queue, in which what stands for a page that was taken out from between stays until it
    comes up: of those that stand for one page the newest counts, if any does. Linking the pages to
    one another instead (an `OrderedDict`) costs several cache misses for each that comes or goes.

    Args:
        num_pages: ids are below this.
    """

    def __init__(self, num_pages: int) -> None:
        self._queue: deque[int] = deque()
        self._is_in = bytearray(num_pages)
        self._num_void: dict[int, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, page: int) -> bool:
        return self._is_in[page] > 0

    def __iter__(self) -> Iterator[int]:
        """The pages, first to be given up first."""
        passed: dict[int, int] = {}
        for page in self._queue:
            num_passed = passed.get(page, 0)
            if num_passed < self._num_void.get(page, 0):
                passed[page] = num_passed + 1
            else:
                yield page

    def extend(self, pages: Sequence[int]) -> None:
        """Puts pages last, as they come; none may be in the queue."""
        is_in = self._is_in
        for page in pages:
            is_in[page] = 1
        self._queue.extend(pages)
        self._size += len(pages)

    def remove(self, page: int) -> None:
        """Takes a page out, wherever it stands."""
        assert self._is_in[page], page
        self._is_in[page] = 0
        self._size -= 1
        self._num_void[page] = self._num_void.get(page, 0) + 1
        if len(self._queue) > 2 * self._size + _FEW:
            self._queue = deque(self)
            self._num_void.clear()

    def pop(self, num_pages: int) -> list[int]:
        """Takes out the first pages. There must be as many."""
        assert num_pages <= self._size, (num_pages, self._size)
        take, void, is_in = self._queue.popleft, self._num_void, self._is_in
        if not void:
            pages = [take() for _ in range(num_pages)]
        else:
            pages = []
            while len(pages) < num_pages:
                page = take()
                num_void = void.pop(page, 0)
                if not num_void:
                    pages.append(page)
                elif num_void > 1:
                    void[page] = num_void - 1
        for page in pages:
            is_in[page] = 0
        self._size -= num_pages
        return pages

    def clear(self) -> None:
        """Takes every page out."""
        for page in self:
            self._is_in[page] = 0
        self._queue.clear()
        self._num_void.clear()
        self._size = 0
