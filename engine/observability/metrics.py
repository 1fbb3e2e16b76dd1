"""An engine's metrics as typed values: what `/metrics` shows of an engine, and `LLM.get_metrics`.

Names are vLLM's behind the prefix `octavo:`, and so are the kinds of value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from octavo.engine.observability.load import EngineLoad

PREFIX = "octavo:"

_GAUGES = {
    "num_requests_running": ("num_running", "Requests with a row on the device."),
    "num_requests_waiting": ("num_waiting", "Requests that wait for one."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Share of KV pages in use, 0 to 1."),
    "kv_cache_waste_perc": ("kv_waste", "Share of held token places that nothing is written to."),
    "num_kv_pages_free": ("num_free_pages", "KV pages that can be given away."),
    "num_kv_pages": ("num_total_pages", "KV pages."),
    "num_kv_pages_cached": ("num_cached_pages", "KV pages that hold cached prefixes alone."),
    "num_kv_pages_projected": (
        "num_projected_pages",
        "Most KV pages that the running requests are expected to hold together.",
    ),
    "padding_waste_perc": ("padding_waste", "Share of computed token slots that held no token."),
    "device_idle_perc": (
        "device_idle_share",
        "Share of time without a wanted step.",
    ),
    "host_seconds_per_step": ("host_s_per_step", "Host seconds a step, in the mean."),
    "wrong_refusals_ratio": (
        "wrong_refusals_ratio",
        "Share of the probes of refusals that were on time: refusals that were wrong.",
    ),
    "predicted_time_to_first_token_seconds": (
        "predicted_ttft_s",
        "Until a request of one token of class normal that came now would have its first token.",
    ),
}
_COUNTERS = {
    "num_preemptions": ("num_preemptions", "Times a request lost its pages."),
    "prompt_tokens": ("prompt_tokens", "Tokens of accepted prompts."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the cache."),
    "engine_steps": ("num_steps", "Steps dispatched."),
    "step_tokens": ("num_step_tokens", "Tokens computed, in each step's first iteration."),
    "step_token_slots": ("num_step_slots", "Token slots of dispatched programs."),
    "compiles_after_ready": (
        "compiles_after_ready",
        "Programs a step had to wait for.",
    ),
    "step_failures": ("num_step_failures", "Steps that failed, so that everybody started over."),
    "requests_quarantined": ("num_quarantined", "Requests found to make steps fail."),
    "requests_unattainable": (
        "num_unattainable",
        "Requests refused because no idle server could meet their targets.",
    ),
    "refusal_probes": (
        "num_probes",
        "Requests that were to be refused and were served, to see whether that was right.",
    ),
    "refusal_probe_tokens": ("num_probe_tokens", "Tokens that probes of refusals took."),
    "moved_requests": ("num_moved", "Requests that moved to another replica while they ran."),
    "kv_pages_given": ("num_pages_given", "KV pages that went to other engines."),
    "kv_pages_taken": ("num_pages_taken", "KV pages that came from other engines."),
    "requests_given_up": ("num_rejected", "Requests given up for lack of capacity as they waited."),
    "device_busy_seconds": ("device_busy_s", "Time with a step on the device."),
    "device_idle_seconds": ("device_idle_s", "Time without a step though one was wanted."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric at one moment.

    Attributes:
        name: with its prefix, as in `/metrics`; a counter's without `_total`.
        documentation: what it is.
        labels: what tells it from others of its name.
    """

    name: str
    documentation: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """A count since the start, or a sum of seconds."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """A figure of the moment."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram(Metric):
    """A distribution since the start.

    Attributes:
        count, sum: of all values.
        buckets: upper bound -> how many values are not above it; the last one is "+Inf".
    """

    count: int
    sum: float
    buckets: Mapping[str, int]


def engine_metrics(load: EngineLoad) -> Iterator[Metric]:
    """An engine's metrics, those of one name side by side.

    Args:
        load: of the moment.
    """
    for name, (figure, text) in _GAUGES.items():
        value = getattr(load, figure)
        yield Gauge(name=PREFIX + name, documentation=text, value=value)
    for name, (figure, text) in _COUNTERS.items():
        value = getattr(load, figure)
        yield Counter(name=PREFIX + name, documentation=text, value=value)
    yield from _preemptions(load)
    for bound, value in zip(("low", "high"), load.wrong_refusals_interval, strict=True):
        yield Gauge(
            name=PREFIX + "wrong_refusals_ratio_interval",
            documentation="The 95% interval of wrong_refusals_ratio.",
            labels={"bound": bound},
            value=value,
        )
    for name, figure, text in (
        ("queue_requests", "num_waiting", "Requests that wait, by class."),
        ("queue_oldest_seconds", "oldest_s", "How long the oldest has waited."),
    ):
        for priority, queue in sorted(load.queues.items()):
            yield Gauge(
                name=PREFIX + name,
                documentation=text,
                labels={"class": priority.name.lower()},
                value=getattr(queue, figure),
            )
    counts = list(accumulate(load.steps_by_tokens))
    bounds = [*[str(float(2**k - 1)) for k in range(len(counts) - 1)], "+Inf"]
    yield Histogram(
        name=PREFIX + "iteration_tokens_total",
        documentation="Tokens computed in a step.",
        count=counts[-1],
        sum=float(load.num_step_tokens),
        buckets=dict(zip(bounds, counts, strict=True)),
    )


def _preemptions(load: EngineLoad) -> Iterator[Metric]:
    num_recomputes = load.num_preemptions - load.num_swaps
    for name, text, swapped, recomputed in (
        ("preemptions", "Preemptions by what became of the pages.", load.num_swaps, num_recomputes),
        (
            "preempted_tokens",
            "Tokens that preempted requests had computed.",
            load.num_swapped_tokens,
            load.num_recomputed_tokens,
        ),
        (
            "preemption_cost_seconds",
            "Seconds that copying pages out and back, or computing again, was expected to take.",
            load.swap_cost_s,
            load.recompute_cost_s,
        ),
    ):
        for kind, value in (("swap", swapped), ("recompute", recomputed)):
            labels = {"kind": kind}
            yield Counter(name=PREFIX + name, documentation=text, labels=labels, value=value)
