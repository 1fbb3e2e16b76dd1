"""How busy a scheduler is: what metrics, load reports and benchmarks read."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.request import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLoad:
    """The waiting requests of one priority class.

    Attributes:
        num_waiting: how many.
        oldest_s: how long the longest has been waiting, in seconds.
        num_prompt_tokens: prompt tokens they need computed.
    """

    num_waiting: int
    oldest_s: float
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLoad:
    """Figures of one moment, and counts since the start.

    Attributes:
        num_running, num_waiting: live requests with and without a row on the device.
        num_pages, num_owned_pages, num_cached_pages: usable pages; those held by live sequences;
            those kept only to be found again.
        kv_usage: owned pages as a share of usable ones, 0 to 1.
        kv_waste: share of the token places held by running sequences that no dispatched step
            writes, 0 to 1; a shared page counts for each holder.
        num_steps: steps planned.
        num_planned_prefill_tokens: prompt (and recomputed) tokens planned.
        num_planned_decode_tokens: most tokens that planned decode rows may emit.
        num_preemptions: times a request lost its pages.
        num_finished: terminal events.
        num_free_pages: pages that nobody holds and that hold nothing worth keeping.
        num_transfer_pages: pages being filled from the host.
        num_projected_pages: most pages that the running requests are expected to hold together
            before any of them ends.
        num_host_pages, num_host_owned_pages, num_host_cached_pages: of the host tier.
        num_swaps, num_recomputes: preemptions whose pages were copied out, and were not.
        num_swapped_tokens, num_recomputed_tokens: tokens that the victims of each had computed.
        swap_cost_s, recompute_cost_s: seconds that undoing each was expected to take: copies out
            and back, computing all of it again (no cached prefix assumed).
        num_rejected: requests given up for lack of capacity.
        num_pinned: waiting requests that have waited their longest.
        queues: the waiting by class.
        step_s: expected seconds of a step at this moment's load.
        prefix_queried_tokens, prefix_hit_tokens: tokens looked up in the prefix cache at first
            admission, and found.
    """

    num_running: int
    num_waiting: int
    num_pages: int
    num_owned_pages: int
    num_cached_pages: int
    kv_usage: float
    kv_waste: float
    num_steps: int
    num_planned_prefill_tokens: int
    num_planned_decode_tokens: int
    num_preemptions: int
    num_finished: int
    num_free_pages: int
    num_transfer_pages: int
    num_projected_pages: int
    num_host_pages: int
    num_host_owned_pages: int
    num_host_cached_pages: int
    num_swaps: int
    num_recomputes: int
    num_swapped_tokens: int
    num_recomputed_tokens: int
    swap_cost_s: float
    recompute_cost_s: float
    num_rejected: int
    num_pinned: int
    queues: dict[Priority, QueueLoad]
    step_s: float
    prefix_queried_tokens: int
    prefix_hit_tokens: int
