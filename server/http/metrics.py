"""GET /metrics: Prometheus' text format, with vLLM's names behind the prefix `octavo:`.

Everything is read when a scraper asks: gauges and counters from the engine's own load report, what
became of requests from `RequestStats`. Nothing is updated for it while tokens are generated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from octavo.engine.observability.load import EngineLoad
from octavo.engine.request import Priority
from octavo.server.front import Front
from octavo.server.request_stats import Histogram, RequestStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
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
    "requests_given_up": ("num_rejected", "Requests given up for lack of capacity as they waited."),
    "device_busy_seconds": ("device_busy_s", "Time with a step on the device."),
    "device_idle_seconds": ("device_idle_s", "Time without a step though one was wanted."),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("ttft_s", "From acceptance to the first token."),
    "inter_token_latency_seconds": ("itl_s", "Between tokens of a completion."),
    "request_time_per_output_token_seconds": ("tpot_s", "Mean time a token after the first."),
    "e2e_request_latency_seconds": ("e2e_s", "From acceptance to the last token."),
    "request_queue_time_seconds": ("queue_s", "From acceptance to the first step."),
    "request_prefill_time_seconds": ("prefill_s", "From the first step to the first token."),
    "request_decode_time_seconds": ("decode_s", "From the first token to the last."),
    "request_prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "request_generation_tokens": ("generation_tokens", "Tokens generated for a request."),
}


class Exposition:
    """The metrics of one server.

    Args:
        front: what they are read from.
    """

    def __init__(self, front: Front) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_FrontCollector(front))

    def render(self) -> bytes:
        """The page."""
        page: bytes = generate_latest(self._registry)
        return page


class _FrontCollector(Collector):
    def __init__(self, front: Front) -> None:
        self._front = front

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not read an engine that is not there yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics, as of now."""
        front = self._front
        yield GaugeMetricFamily(PREFIX + "ready", "1 while requests are served.", front.is_ready)
        yield GaugeMetricFamily(PREFIX + "alive", "0 if broken or stuck.", front.is_alive)
        yield GaugeMetricFamily(
            PREFIX + "num_requests_inflight", "Requests being answered.", front.num_inflight
        )
        if front.engine is not None:
            yield from _engine_metrics(front.engine.load())
        yield from self._request_metrics()
        yield _prediction_errors(front.stats)

    def _request_metrics(self) -> Iterator[Metric]:
        stats = self._front.stats
        for name, (field, text) in _HISTOGRAMS.items():
            yield _histogram(name, text, getattr(stats, field))
        ends = _counter("request_success", "Requests that ended, by reason.", "finished_reason")
        for reason in sorted({"stop", "length", "cancelled", *stats.ends}):
            ends.add_metric([reason], stats.ends[reason])
        yield ends
        refusals = _counter("requests_refused", "Requests that ended in an error.", "reason")
        for reason in sorted({"overloaded", *stats.refusals}):
            refusals.add_metric([reason], stats.refusals[reason])
        yield refusals
        slo = _counter("slo_requests", "Requests with a target.", "class", "target", "met")
        for (name, target, met), number in sorted(stats.slo.items()):
            slo.add_metric([name, target, str(met).lower()], number)
        yield slo
        good = _counter("good_requests", "Requests that ended well within their targets.", "class")
        tokens = _counter("good_tokens", "Tokens generated for them.", "class")
        for name in _class_names():
            good.add_metric([name], stats.good_requests[name])
            tokens.add_metric([name], stats.good_tokens[name])
        yield good
        yield tokens


def _engine_metrics(load: EngineLoad) -> Iterator[Metric]:
    for name, (field, text) in _GAUGES.items():
        yield GaugeMetricFamily(PREFIX + name, text, getattr(load, field))
    for name, (field, text) in _COUNTERS.items():
        yield CounterMetricFamily(PREFIX + name, text, getattr(load, field))
    yield from _preemption_metrics(load)
    interval = GaugeMetricFamily(
        PREFIX + "wrong_refusals_ratio_interval",
        "The 95% interval of wrong_refusals_ratio.",
        labels=["bound"],
    )
    for bound, value in zip(("low", "high"), load.wrong_refusals_interval, strict=True):
        interval.add_metric([bound], value)
    yield interval
    waiting = GaugeMetricFamily(
        PREFIX + "queue_requests", "Requests that wait, by class.", labels=["class"]
    )
    oldest = GaugeMetricFamily(
        PREFIX + "queue_oldest_seconds", "How long the oldest has waited.", labels=["class"]
    )
    for priority, queue in sorted(load.queues.items()):
        waiting.add_metric([priority.name.lower()], queue.num_waiting)
        oldest.add_metric([priority.name.lower()], queue.oldest_s)
    yield waiting
    yield oldest
    steps = Histogram([float(2**k - 1) for k in range(len(load.steps_by_tokens) - 1)])
    steps.counts = list(load.steps_by_tokens)
    steps.sum = float(load.num_step_tokens)
    yield _histogram("iteration_tokens_total", "Tokens computed in a step.", steps)
    yield SummaryMetricFamily(
        PREFIX + "step_time_model_error",
        "Relative errors of predicted step times.",
        load.num_step_times,
        load.step_time_error,
    )


def _prediction_errors(stats: RequestStats) -> Metric:
    errors = GaugeMetricFamily(
        PREFIX + "ttft_prediction_error_ratio",
        "Error of predicted times to the first token over the real ones, of the last 512 requests.",
        labels=["quantile"],
    )
    for quantile in (0.5, 0.95):
        errors.add_metric([str(quantile)], stats.prediction_error(quantile))
    return errors


def _preemption_metrics(load: EngineLoad) -> Iterator[Metric]:
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
        kinds = _counter(name, text, "kind")
        kinds.add_metric(["swap"], swapped)
        kinds.add_metric(["recompute"], recomputed)
        yield kinds


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, labels=list(labels))


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    return HistogramMetricFamily(PREFIX + name, text, buckets, histogram.sum)


def _class_names() -> list[str]:
    return [priority.name.lower() for priority in Priority]
