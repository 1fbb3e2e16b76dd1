"""What each tenant was served, so that none is served much more than another."""

from __future__ import annotations


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
