"""How busy an engine is."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.request import Priority
from octavo.engine.scheduler.load import QueueLoad
from octavo.engine.scheduler.refusals import wilson_interval
from octavo.engine.scheduler.standing import UNKNOWN, Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Figures of one moment, and counts since the start.

    Attributes:
        num_running, num_waiting: requests with and without a row on the device.
        num_free_pages, num_total_pages: KV pages that can be given away (cached ones that nobody
            reads included), and all usable ones.
        kv_cache_usage: share of pages held by live requests, 0 to 1.
        kv_waste: share of the token places they hold that nothing is written to, 0 to 1.
        num_preemptions: times a request lost its pages.
        prompt_tokens, generation_tokens: tokens of accepted prompts, tokens generated.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up in the prefix cache, and
            found.
        num_steps: dispatches.
        padding_waste: share of the token slots of dispatched programs that held no token.
        compiles_after_ready: programs a step had to wait for.
        host_s_per_step: host seconds a step for planning, packing, dispatch and commit.
        device_idle_share: share of time without a queued step while one was wanted.
        queues: the waiting by priority class.
        num_cached_pages, num_projected_pages: pages that hold cached prefixes alone; most pages
            that the running requests are expected to hold together.
        num_rejected: requests refused or given up for lack of capacity.
        num_swaps: preemptions whose pages went to host memory.
        num_swapped_tokens, num_recomputed_tokens: tokens that preempted requests had computed,
            whose pages went to host memory, or which are computed again.
        swap_cost_s, recompute_cost_s: seconds that undoing these preemptions was expected to take.
        num_step_tokens, num_step_slots: tokens computed, and token slots of their programs.
        steps_by_tokens: at k, the steps that computed from 2**(k-1) to 2**k - 1 tokens.
        device_busy_s, device_idle_s: time with a step on the device, and without one while one was
            wanted.
        num_step_times, step_time_error: steps whose time was predicted, and the sum of the
            predictions' relative errors.
        predicted_ttft_s: seconds until a new request of the asked size and class would have its
            first token.
        num_step_failures: steps that failed, so that everybody started over.
        num_quarantined: requests that were found to make steps fail.
        num_unattainable: requests refused at the door because no idle machine could meet their
            targets.
        num_probes, num_wrong_refusals: requests that were to be refused and were served instead,
            to see whether that would have been right; and those of them that were on time.
        num_probe_tokens: tokens that probes took.
        num_moved: requests that were moved from one replica to another while they ran.
        num_pages_given, num_pages_taken: pages that went to other engines and came from them.
        standing: for routers: what a new request would find.
        behind_s: seconds since requests were last taken in: later ones are not in the figures.
    """

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_total_pages: int
    kv_cache_usage: float
    kv_waste: float
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_steps: int
    padding_waste: float
    compiles_after_ready: int
    host_s_per_step: float
    device_idle_share: float
    queues: dict[Priority, QueueLoad]
    num_cached_pages: int
    num_projected_pages: int
    num_rejected: int
    num_swaps: int
    num_swapped_tokens: int
    num_recomputed_tokens: int
    swap_cost_s: float
    recompute_cost_s: float
    num_step_tokens: int
    num_step_slots: int
    steps_by_tokens: tuple[int, ...]
    device_busy_s: float
    device_idle_s: float
    num_step_times: int
    step_time_error: float
    predicted_ttft_s: float
    num_step_failures: int
    num_quarantined: int
    num_unattainable: int
    num_probes: int
    num_wrong_refusals: int
    num_probe_tokens: int
    num_moved: int = 0
    num_pages_given: int = 0
    num_pages_taken: int = 0
    standing: Standing = UNKNOWN
    behind_s: float = 0.0

    @property
    def wrong_refusals_ratio(self) -> float:
        """Share of the probes that were on time, 0 to 1; 0 before any."""
        return self.num_wrong_refusals / self.num_probes if self.num_probes else 0.0

    @property
    def wrong_refusals_interval(self) -> tuple[float, float]:
        """The 95% interval of `wrong_refusals_ratio`."""
        return wilson_interval(self.num_wrong_refusals, self.num_probes)
