"""How busy a scheduler is: what metrics, load reports and benchmarks read."""

from __future__ import annotations

from dataclasses import dataclass


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
    prefix_queried_tokens: int
    prefix_hit_tokens: int
