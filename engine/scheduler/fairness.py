"""Who must come first whatever the policy says: the long-waiting, and classes below their share."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from octavo.engine.request import Priority
from octavo.engine.scheduler.live_request import LiveRequest

if TYPE_CHECKING:
    from octavo.engine.scheduler.snapshot import Snapshot

DEFAULT_SHARES = (0.2, 0.15, 0.1, 0.05)
"""Shares of the prompt tokens, computed or brought back from the host, and of the pages, that each
class may count on while it has any waiting."""

WINDOW_TOKENS = 65_536.0
"""Over about how many prompt tokens shares are counted."""


class MaximumWait:
    """Finds requests that have waited longer than anybody should.

    Args:
        max_wait_s: the longest a request waits, of one stretch, before it is pinned to the top.
    """

    def __init__(self, max_wait_s: float) -> None:
        self.max_wait_s = max_wait_s
        self._waiting: list[tuple[float, int, LiveRequest]] = []

    def began(self, entry: LiveRequest) -> None:
        """A request begins to wait, at its `waiting_since_s`."""
        heapq.heappush(self._waiting, (entry.waiting_since_s, entry.number, entry))

    def overdue(self, now_s: float) -> list[LiveRequest]:
        """Requests whose wait has become too long since the last call, longest wait first."""
        found: list[LiveRequest] = []
        heap = self._waiting
        while heap and heap[0][0] + self.max_wait_s <= now_s:
            since_s, _, entry = heapq.heappop(heap)
            still_waits = entry.is_live and entry.request.slot is None
            if still_waits and entry.waiting_since_s == since_s and not entry.is_pinned:
                found.append(entry)
        return found


class ClassShares:
    """Prompt tokens served by class, old ones forgotten, against what each class may count on.

    KV that comes back from the host counts as if it were computed: a class is served by either.

    Args:
        shares: by class, each 0 to 1, together ≤ 1.
    """

    def __init__(self, shares: Sequence[float] = DEFAULT_SHARES) -> None:
        assert len(shares) == len(Priority), shares
        assert sum(shares) <= 1, shares
        self._shares = tuple(shares)
        self._served = [0.0] * len(shares)

    def serve(self, priority: int, num_tokens: int) -> None:
        """Counts prompt tokens planned for a class, or on their way back from the host."""
        keep = 0.5 ** (num_tokens / WINDOW_TOKENS)
        self._served = [served * keep for served in self._served]
        self._served[priority] += num_tokens

    def below_share(self) -> list[int]:
        """Classes that were served less than their share, the furthest below first."""
        total = sum(self._served)
        if total < WINDOW_TOKENS / 16:
            return []
        lacking = []
        for index, served in enumerate(self._served):
            share = self._shares[index]
            if served < share * total:
                lacking.append((served / total - share, index))
        lacking.sort()
        return [index for _, index in lacking]


def short_of_pages(snapshot: Snapshot, shares: Sequence[float] = DEFAULT_SHARES) -> list[int]:
    """Classes that hold less than their share of the pages, the furthest below first.

    Args:
        shares: of the pool, by class.
    """
    num_pages, page_size = snapshot.limits.num_pages - 1, snapshot.limits.page_size
    if snapshot.num_available_pages * 4 >= num_pages:
        return []  # there are pages for whoever waits
    held = np.bincount(
        snapshot.columns.priority[snapshot.decode_slots],
        snapshot.decode_starts // page_size + 1,
        len(Priority),
    )
    for request in (*snapshot.prefilling, *snapshot.demoted):
        held[request.priority] += -(-request.num_tokens // page_size)
    lacking = [
        pages / num_pages - share for pages, share in zip(held.tolist(), shares, strict=True)
    ]
    return sorted([i for i, pages in enumerate(lacking) if pages < 0], key=lacking.__getitem__)


class TenantCounters:
    """Virtual token counters: whoever was served more comes a little later.

    A tenant that comes back after a pause starts level with the least served active one, so that
    nobody saves up service.

    Source: Sheng et al., "Fairness in Serving Large Language Models" (VTC), OSDI 2024.
    """

    OUTPUT_WEIGHT = 2.0
    """An output token counts as much as this many prompt tokens."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._num_live: dict[str, int] = {}

    def enter(self, tenant: str) -> None:
        """A request of a tenant becomes live."""
        if not self._num_live.get(tenant):
            level = self._least()
            self._served[tenant] = max(self._served.get(tenant, 0.0), level)
        self._num_live[tenant] = self._num_live.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """A request of a tenant has ended."""
        left = self._num_live[tenant] - 1
        if left:
            self._num_live[tenant] = left
        else:
            del self._num_live[tenant]
            if len(self._served) > 4 * len(self._num_live) + 1024:
                self._served = {name: self._served[name] for name in self._num_live}

    def serve(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Counts tokens served."""
        self._served[tenant] += num_prompt_tokens + self.OUTPUT_WEIGHT * num_output_tokens

    def lead(self, tenant: str) -> float:
        """Tokens by which a tenant is ahead of the least served active one, ≥ 0."""
        if len(self._num_live) < 2:
            return 0.0
        return max(0.0, self._served.get(tenant, 0.0) - self._least())

    def _least(self) -> float:
        return min((self._served[name] for name in self._num_live), default=0.0)
