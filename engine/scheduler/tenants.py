"""What each tenant was served, so that none is served much more than another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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

    def number_of(self, tenant: str) -> int:
        """The number of a tenant that has a live request."""
        return self._numbers[tenant]

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
