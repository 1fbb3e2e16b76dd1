"""GET /metrics: Prometheus' text format, with vLLM's names behind the prefix `octavo:`.

Everything is read when a scraper asks: gauges and counters from the engine's own load report, what
became of requests from `RequestStats`. Nothing is updated for it while tokens are generated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import groupby

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from octavo.engine.observability import metrics as engine
from octavo.engine.observability.load import EngineLoad
from octavo.engine.observability.metrics import PREFIX, engine_metrics
from octavo.engine.request import Priority
from octavo.server.front import Front
from octavo.server.request_stats import Histogram, RequestStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

VLLM_PREFIX = "vllm:"
VLLM_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
"""Gauges that are shown under vLLM's own names, too: where endpoint pickers of the Gateway API's
inference extension read them (its proposal 003, "model server protocol")."""

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
    """An engine's metrics as Prometheus has them: those of one name are one family."""
    for _, same_name in groupby(engine_metrics(load), key=lambda metric: metric.name):
        metrics = list(same_name)
        yield _family(metrics)
        name = metrics[0].name.removeprefix(PREFIX)
        if name in VLLM_GAUGES:
            [gauge] = metrics
            yield _family([dataclasses.replace(gauge, name=VLLM_PREFIX + name)])
    yield SummaryMetricFamily(
        PREFIX + "step_time_model_error",
        "Relative errors of predicted step times.",
        load.num_step_times,
        load.step_time_error,
    )


def _family(metrics: list[engine.Metric]) -> Metric:
    """Metrics of one name and kind.

    Args:
        metrics: at least one.
    """
    first = metrics[0]
    names = list(first.labels)
    match first:
        case engine.Histogram():
            buckets = [(bound, float(count)) for bound, count in first.buckets.items()]
            return HistogramMetricFamily(first.name, first.documentation, buckets, first.sum)
        case engine.Counter():
            kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily
        case _:
            kind = GaugeMetricFamily
    family = kind(first.name, first.documentation, labels=names)
    for metric in metrics:
        assert isinstance(metric, engine.Counter | engine.Gauge)
        family.add_metric(list(metric.labels.values()), metric.value)
    return family


def _prediction_errors(stats: RequestStats) -> Metric:
    errors = GaugeMetricFamily(
        PREFIX + "ttft_prediction_error_ratio",
        "Error of predicted times to the first token over the real ones, of the last 512 requests.",
        labels=["quantile"],
    )
    for quantile in (0.5, 0.95):
        errors.add_metric([str(quantile)], stats.prediction_error(quantile))
    return errors


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
