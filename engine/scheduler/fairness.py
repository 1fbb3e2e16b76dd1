"""Who must come first whatever the policy says: the long-waiting, and classes below their quota."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Sequence

from octavo.engine.request import Priority
from octavo.engine.scheduler.live_request import LiveRequest

DEFAULT_QUOTAS = (0.2, 0.15, 0.1, 0.05)
"""Shares of the prompt tokens, computed or brought back from the host, and of the pages, that each
class may count on while it has any waiting."""

WINDOW_TOKENS = 65_536.0
"""Over about how many prompt tokens quotas are counted."""


_FEW = 64


class MaximumWait:
    """Finds requests that have waited longer than anybody should.

    Args:
        max_wait_s: the longest a request waits, of one stretch, before it is pinned to the top.
        find: the live request with an id, or None.
    """

    def __init__(self, max_wait_s: float, find: Callable[[str], LiveRequest | None]) -> None:
        self.max_wait_s = max_wait_s
        self._find = find
        # By name: records kept here until their time is up would be garbage for minutes, and
        # have Python's collector look for more.
        self._waiting: list[tuple[float, int, str]] = []
        self._most = _FEW

    def __len__(self) -> int:
        """Waits that are remembered, some of them over."""
        return len(self._waiting)

    def began(self, entry: LiveRequest) -> None:
        """A request begins to wait, at its `waiting_since_s`."""
        if len(self._waiting) >= self._most:
            self._waiting = [item for item in self._waiting if self._waits_since(*item)]
            heapq.heapify(self._waiting)
            self._most = 2 * len(self._waiting) + _FEW
        item = (entry.waiting_since_s, entry.number, entry.request.request_id)
        heapq.heappush(self._waiting, item)

    def overdue(self, now_s: float) -> list[LiveRequest]:
        """Requests whose wait has become too long since the last call, longest wait first."""
        found: list[LiveRequest] = []
        heap = self._waiting
        while heap and heap[0][0] + self.max_wait_s <= now_s:
            entry = self._waits_since(*heapq.heappop(heap))
            if entry is not None:
                found.append(entry)
        return found

    def _waits_since(self, since_s: float, number: int, request_id: str) -> LiveRequest | None:
        """The request, if it has waited ever since and is not pinned."""
        entry = self._find(request_id)
        if entry is None or entry.number != number or entry.request.slot is not None:
            return None
        return entry if entry.waiting_since_s == since_s and not entry.is_pinned else None


class ClassQuotas:
    """Prompt tokens served by class, old ones forgotten, against what each class may count on.

    KV that comes back from the host counts as if it were computed: a class is served by either.

    Args:
        quotas: by class, each 0 to 1, together ≤ 1.
    """

    def __init__(self, quotas: Sequence[float] = DEFAULT_QUOTAS) -> None:
        assert len(quotas) == len(Priority), quotas
        assert sum(quotas) <= 1, quotas
        self._quotas = tuple(quotas)
        self._served = [0.0] * len(quotas)
        self._below: list[int] = []  # of all classes

    def serve(self, chunks: Sequence[tuple[int, int]]) -> None:
        """Counts prompt tokens that were planned, or are on their way back from the host.

        Args:
            chunks: (class, tokens) of each, in order.
        """
        if not chunks:
            return
        served = self._served
        for priority, num_tokens in chunks:
            keep = 0.5 ** (num_tokens / WINDOW_TOKENS)
            served = [tokens * keep for tokens in served]
            served[priority] += num_tokens
        self._served = served
        total = sum(served)
        if total >= WINDOW_TOKENS / 16:
            lacking = [
                (tokens / total - quota, index)
                for index, (tokens, quota) in enumerate(zip(served, self._quotas, strict=True))
                if tokens < quota * total
            ]
            self._below = [index for _, index in sorted(lacking)]
        else:
            self._below = []

    def below_quota(self, classes: Container[float] = tuple(Priority)) -> list[int]:
        """Those of `classes` that were served less than their quota, the furthest below first."""
        return [index for index in self._below if index in classes]


def short_of_pages(
    held: Sequence[float], num_pages: int, quotas: Sequence[float] = DEFAULT_QUOTAS
) -> list[int]:
    """Classes that hold less than their quota of the pages, the furthest below first.

    Args:
        held: pages that each class holds.
        num_pages: of the pool.
        quotas: of the pool, by class.
    """
    lacking = [pages / num_pages - quota for pages, quota in zip(held, quotas, strict=True)]
    return sorted([i for i, pages in enumerate(lacking) if pages < 0], key=lacking.__getitem__)
