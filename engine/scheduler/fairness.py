"""What each class and each tenant was served: a class has a quota, and tenants take turns."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.request import Priority

DEFAULT_QUOTAS = (0.2, 0.15, 0.1, 0.05)
"""Shares of the prompt tokens, computed or brought back from the host, and of the pages, that each
class may count on while it has any waiting."""

WINDOW_TOKENS = 65_536.0
"""Over about how many prompt tokens quotas are counted."""


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


def short_of_pages(held: Sequence[float], num_pages: int) -> list[int]:
    """Classes that hold less than their quota of the pages, the furthest below first.

    Args:
        held: pages that each class holds.
        num_pages: of the pool.
    """
    lacking = [pages / num_pages - quota for pages, quota in zip(held, DEFAULT_QUOTAS, strict=True)]
    return sorted([i for i, pages in enumerate(lacking) if pages < 0], key=lacking.__getitem__)


_FIRST_SIZE = 16
_MOST_AWAY = 1024
"""Tenants without a live request whose counters are kept, besides four for each that has one."""


class TenantCounters:
    """Virtual token counters: the tenant that was served least comes next.

    A tenant is known by a number from its first live request on. Its counter outlives its requests,
    and is forgotten only when many tenants have come and gone.

    Source: Sheng et al., "Fairness in Serving Large Language Models" (VTC), OSDI 2024.

    Attributes:
        served: float64[numbers], each tenant's counter: prompt tokens that were computed for it,
            and output tokens times `OUTPUT_WEIGHT`.
    """

    OUTPUT_WEIGHT = 2.0
    """An output token counts as much as this many prompt tokens."""

    def __init__(self) -> None:
        self.served: NDArray[np.float64] = np.zeros(_FIRST_SIZE)
        self._numbers: dict[str, int] = {}
        self._num_live: dict[str, int] = {}
        self._free = list(range(_FIRST_SIZE - 1, -1, -1))
        self._last: str | None = None

    @property
    def num_live(self) -> int:
        """Tenants that have a live request."""
        return len(self._num_live)

    def enter(self, tenant: str) -> int:
        """A request of a tenant becomes live; returns the tenant's number."""
        self._num_live[tenant] = self._num_live.get(tenant, 0) + 1
        number = self._numbers.get(tenant)
        if number is None:
            if not self._free:
                size = len(self.served)
                self.served = np.concatenate((self.served, np.zeros(size)))
                self._free.extend(range(2 * size - 1, size - 1, -1))
            number = self._numbers[tenant] = self._free.pop()
            self.served[number] = 0.0
        return number

    def leave(self, tenant: str) -> None:
        """A request of a tenant has ended."""
        left = self._num_live[tenant] - 1
        if left:
            self._num_live[tenant] = left
            return
        del self._num_live[tenant]
        if len(self._numbers) > 4 * len(self._num_live) + _MOST_AWAY:
            self._forget()

    def begin_to_wait(self, number: int, least: float | None) -> None:
        """A tenant, of which no request waited, has one that does: it comes level with the least
        served tenant that waits, so that no tenant saves up service while it asks for none.

        Args:
            least: that tenant's counter; None if no request waits: then the level is that of the
                tenant whose request was the last to wait.
        """
        if least is None:
            if self._last is None:
                return
            least = self.served.item(self._numbers[self._last])
        if self.served.item(number) < least:
            self.served[number] = least

    def waits_last(self, tenant: str) -> None:
        """No request waits any more; the last one was this tenant's."""
        self._last = tenant

    def serve(self, number: int, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Counts tokens served."""
        self.served[number] += num_prompt_tokens + self.OUTPUT_WEIGHT * num_output_tokens

    def serve_rows(
        self, numbers: NDArray[np.intp], num_tokens: Sequence[int] | NDArray[np.int32] | None = None
    ) -> None:
        """Counts output tokens of rows.

        Args:
            numbers: intp[rows], their tenants.
            num_tokens: of each row; None for one.
        """
        if len(self._num_live) == 1 and len(numbers):  # all of them are its
            total = len(numbers) if num_tokens is None else int(np.sum(num_tokens))
            self.served[numbers[0]] += self.OUTPUT_WEIGHT * total
            return
        counts = np.bincount(numbers, num_tokens, len(self.served))
        self.served += self.OUTPUT_WEIGHT * counts

    def _forget(self) -> None:
        """Forgets half of the tenants that have no live request: those served least, which come
        back level with the least served tenant that waits in any case."""
        away = [name for name in self._numbers if name not in self._num_live and name != self._last]
        away.sort(key=lambda name: self.served.item(self._numbers[name]))
        for name in away[: len(away) // 2]:
            self._free.append(self._numbers.pop(name))
