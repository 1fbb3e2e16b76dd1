"""The load of several replicas as that of one engine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from octavo.engine.observability.load import EngineLoad
from octavo.engine.replicas.messages import PROBE_TOKENS, LoadReport
from octavo.engine.request import Priority
from octavo.engine.scheduler.load import QueueLoad
from octavo.engine.scheduler.standing import merge_standings

_SUMS = (
    *("num_running", "num_waiting", "num_free_pages", "num_total_pages", "num_preemptions"),
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("num_steps", "compiles_after_ready", "num_cached_pages", "num_projected_pages"),
    *("num_rejected", "num_swaps", "num_swapped_tokens", "num_recomputed_tokens"),
    *("swap_cost_s", "recompute_cost_s", "num_step_tokens", "num_step_slots"),
    *("device_busy_s", "device_idle_s", "num_step_times", "step_time_error"),
    *("num_step_failures", "num_quarantined", "num_unattainable"),
    *("num_probes", "num_wrong_refusals", "num_probe_tokens"),
    *("num_pages_given", "num_pages_taken"),
)
"""Figures of `EngineLoad` that are those of all replicas together."""


def merge_loads(
    reports: Sequence[LoadReport], num_prompt_tokens: int, priority: Priority
) -> EngineLoad:
    """One engine's load from that of its replicas.

    Counts add up, shares are those of the whole, and a new request's first token is predicted for
    the replica that would have it first: in proportion between the two sizes that each predicted.

    Args:
        reports: one of each replica, one at least.
        num_prompt_tokens, priority: of the request whose first token is predicted.
    """
    loads = [report.load for report in reports]
    sums = {name: sum(getattr(load, name) for load in loads) for name in _SUMS}
    num_owned = [load.num_total_pages - load.num_free_pages for load in loads]
    waste = sum(owned * load.kv_waste for owned, load in zip(num_owned, loads, strict=True)) / max(
        1, sum(num_owned)
    )
    wall_s = sums["device_busy_s"] + sums["device_idle_s"]
    host_s = sum(load.host_s_per_step * load.num_steps for load in loads)
    return EngineLoad(
        **sums,
        kv_cache_usage=sum(num_owned) / max(1, sums["num_total_pages"]),
        kv_waste=waste,
        padding_waste=1 - sums["num_step_tokens"] / max(1, sums["num_step_slots"]),
        host_s_per_step=host_s / max(1, sums["num_steps"]),
        device_idle_share=sums["device_idle_s"] / wall_s if wall_s else 0.0,
        queues=_merge_queues([load.queues for load in loads]),
        steps_by_tokens=tuple(
            sum(counts)
            for counts in zip_longest(*(load.steps_by_tokens for load in loads), fillvalue=0)
        ),
        predicted_ttft_s=min(
            _predict(report.ttft_s[priority], num_prompt_tokens) for report in reports
        ),
        standing=merge_standings([load.standing for load in loads]),
        behind_s=max(load.behind_s for load in loads),
    )


def _merge_queues(queues: Sequence[dict[Priority, QueueLoad]]) -> dict[Priority, QueueLoad]:
    merged = {}
    for priority in dict.fromkeys(priority for each in queues for priority in each):
        of_class = [each[priority] for each in queues if priority in each]
        merged[priority] = QueueLoad(
            num_waiting=sum(queue.num_waiting for queue in of_class),
            oldest_s=max(queue.oldest_s for queue in of_class),
            num_prompt_tokens=sum(queue.num_prompt_tokens for queue in of_class),
        )
    return merged


def _predict(ttft_s: tuple[float, float], num_prompt_tokens: int) -> float:
    short_s, long_s = ttft_s
    share = (num_prompt_tokens - 1) / (PROBE_TOKENS - 1)
    return max(0.0, short_s + share * (long_s - short_s))
