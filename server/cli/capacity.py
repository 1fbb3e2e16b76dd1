"""What a memory size holds: arithmetic on a model's shape, no weights needed."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from octavo.engine.errors import InvalidConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A memory size divided into weights and KV pages.

    Args:
        weight_bytes: of all parameters in the dtype they are served in.
        kv_bytes_per_token: of a page, which is of one cache group's layers.
        page_size: tokens in a page.
        context_tokens: prompt and output of one request.
        memory_bytes: of all devices together.
        utilization: share of the memory that may be filled, (0, 1].
        bandwidth: bytes a second between device and host.
        network_bandwidth: bytes a second between replicas.
        windows: by cache group, see `PageNeeds`.
        state_bytes: of one request's recurrent states.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    page_size: int
    context_tokens: int
    memory_bytes: int
    utilization: float
    bandwidth: int
    network_bandwidth: int
    windows: tuple[int | None, ...] = (None,)
    state_bytes: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise InvalidConfigError(
                "gpu_memory_utilization", self.utilization, "a number in (0, 1]"
            )
        if self.context_tokens < 1:
            raise InvalidConfigError("context", self.context_tokens, "at least 1 token")

    @property
    def kv_bytes_per_page(self) -> int:
        return self.kv_bytes_per_token * self.page_size

    @property
    def kv_pool_bytes(self) -> int:
        """What is left for pages beside the weights; 0 when the weights do not fit."""
        return max(0, int(self.memory_bytes * self.utilization) - self.weight_bytes)

    @property
    def num_pages(self) -> int:
        """Pages in the pool; one of them takes what padding rows write."""
        return self.kv_pool_bytes // self.kv_bytes_per_page

    @property
    def pages_per_request(self) -> int:
        """Pages that one request of `context_tokens` holds at its end."""
        # Imported here: a command line starts without NumPy.
        from octavo.engine.kv.page_needs import page_needs

        return page_needs(self.page_size, self.windows).held(self.context_tokens)

    @property
    def max_concurrent_requests(self) -> int:
        """Requests of `context_tokens` that fit at once, sharing no prefix."""
        # A page, and a row's states, take what padding rows write.
        spare = self.kv_pool_bytes - self.kv_bytes_per_page - self.state_bytes
        each = self.request_kv_bytes + self.state_bytes
        most = max(0, spare) // each
        if not self.state_bytes or self.windows != (None,):  # there are no snapshots
            return most
        # Imported here: a command line starts without NumPy.
        from octavo.engine.kv.state_snapshots import default_num_places

        def needed(num_rows: int) -> int:
            places = default_num_places(num_rows, self.state_bytes)
            return num_rows * each + places * self.state_bytes

        return max(0, bisect.bisect_right(range(most + 1), spare, key=needed) - 1)

    @property
    def request_kv_bytes(self) -> int:
        return self.pages_per_request * self.kv_bytes_per_page

    @property
    def swap_s(self) -> float:
        """Seconds to move one request's pages to the host, or back."""
        return self.request_kv_bytes / self.bandwidth

    @property
    def hand_off_s(self) -> float:
        """Seconds to move one request's pages to another replica."""
        return self.request_kv_bytes / self.network_bandwidth
