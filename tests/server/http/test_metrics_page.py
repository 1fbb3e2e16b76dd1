"""Prometheus' own parser reads the metrics page, and it tells the truth."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.errors import OverloadedError, StepFailedError
from octavo.engine.input.targets import Targets
from octavo.engine.request import Priority
from octavo.engine.sampling_params import SamplingParams
from octavo.server.front import Front
from octavo.server.http.metrics import Exposition

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples["octavo:" + name, frozenset(labels.items())]


def scrape(live) -> Samples:
    answer = httpx.get(f"{live.http}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parse(answer.text)


GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = (
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "compiles_after_ready_total"),
)
HISTOGRAMS = (
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    "iteration_tokens_total",
)


def test_the_names_that_vllm_users_know_are_all_there(live):
    samples = scrape(live)
    for name in (*GAUGES, *COUNTERS):
        assert value(samples, name) >= 0
    for name in HISTOGRAMS:
        assert value(samples, name + "_count") == value(samples, name + "_bucket", le="+Inf")
    assert value(samples, "ready") == value(samples, "alive") == 1
    assert value(samples, "compiles_after_ready_total") == 0
    for kind in ("swap", "recompute"):
        for name in ("preemptions", "preempted_tokens", "preemption_cost_seconds"):
            assert value(samples, f"{name}_total", kind=kind) == 0


def test_a_stream_counts_once_in_everything_it_touches(live):
    before = scrape(live)
    headers = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "0.000001"}
    body = {"prompt": "abcde", "max_tokens": 9, "ignore_eos": True, "stream": True}
    body["priority"] = "high"
    httpx.post(f"{live.http}/v1/completions", json=body, headers=headers, timeout=60)
    after = scrape(live)

    def grown(name: str, **labels: str) -> float:
        key = "octavo:" + name, frozenset(labels.items())
        return after[key] - before.get(key, 0)

    assert grown("prompt_tokens_total") == 5
    assert grown("generation_tokens_total") == 9
    assert grown("request_success_total", finished_reason="length") == 1
    assert grown("inter_token_latency_seconds_count") == 8
    assert grown("request_generation_tokens_sum") == 9
    for name in HISTOGRAMS:
        if name not in ("inter_token_latency_seconds", "iteration_tokens_total"):
            assert grown(name + "_count") == 1, name
    assert grown("iteration_tokens_total_count") == grown("engine_steps_total") > 0
    assert grown("iteration_tokens_total_sum") == grown("step_tokens_total") >= 5 + 2
    assert grown("step_token_slots_total") >= grown("step_tokens_total")
    assert grown("step_time_model_error_count") > 0
    assert grown("device_busy_seconds_total") > 0
    assert grown("slo_requests_total", **{"class": "high", "target": "ttft", "met": "true"}) == 1
    assert grown("slo_requests_total", **{"class": "high", "target": "tpot", "met": "false"}) == 1
    assert grown("good_requests_total", **{"class": "high"}) == 0


def test_a_good_answer_is_goodput(live):
    before = scrape(live)
    body = {"prompt": "abcde", "max_tokens": 4, "ignore_eos": True, "priority": "low"}
    httpx.post(f"{live.http}/v1/completions", json=body, headers={"x-slo-e2e-ms": "60000"})
    after = scrape(live)
    for name, more in (("good_requests_total", 1), ("good_tokens_total", 4)):
        assert value(after, name, **{"class": "low"}) == more + value(
            before, name, **{"class": "low"}
        )


def test_refusals_are_counted_by_reason(live):
    before = scrape(live)
    httpx.post(f"{live.http}/v1/completions", json={"prompt": "x" * 600})
    after = scrape(live)
    key = "octavo:requests_refused_total", frozenset({("reason", "invalid_request")})
    assert after[key] == before.get(key, 0) + 1


def test_a_server_that_still_loads_has_a_page():
    samples = parse(Exposition(Front()).render().decode())
    assert value(samples, "ready") == 0
    assert value(samples, "alive") == 1


class RefusingEngine(SimpleNamespace):
    async def generate(self, *args: Any, **rest: Any):
        raise OverloadedError("too much at once", 2.0)
        yield


def test_a_request_refused_for_load_missed_its_targets():
    front = Front()
    front.engine = RefusingEngine()
    ask = {"priority": Priority.REALTIME, "targets": Targets(ttft_target_s=1.0)}

    async def read() -> list[Any]:
        return [o async for o in front.generate("x", SamplingParams(), "id", **ask)]

    with pytest.raises(OverloadedError):
        asyncio.run(read())
    assert front.stats.num_failed == 1
    assert front.stats.slo == {("realtime", "ttft", False): 1}
    assert front.num_inflight == 0
    assert not front.stats.good_requests


def test_every_refusal_that_is_given_is_counted_and_once(on_stand, tmp_path):
    (tmp_path / "tokens").write_text("token-0123456789")
    good = {"authorization": "Bearer token-0123456789"}

    async def scenario(stand):
        stats, given = stand.server.front.stats, Counter[str]()
        async with httpx.AsyncClient(base_url=stand.http, headers=good, timeout=20) as client:
            bodies = [
                ({"prompt": "x", "temperature": -1}, "invalid_request"),
                ({"prompt": "x", "unknown": 1}, "invalid_request"),
                ({"prompt": "x", "model": "another"}, "unknown_model"),
                ({"prompt": ["x", "y", "z"], "model": "another"}, "unknown_model"),
            ]
            for body, reason in bodies:
                assert (await client.post("/v1/completions", json=body)).status_code >= 400
                given[reason] += 1
            assert (await client.post("/v1/completions", content=b"{")).status_code == 400
            assert (await client.get("/nowhere")).status_code == 404
            assert (await client.get("/v1/completions")).status_code == 405
            assert (await client.get("/v1/load", headers={"authorization": "x"})).status_code == 401
            large = await client.post("/tokenize", content=b" " * (5 << 20))
            assert large.status_code == 413
            given.update(("invalid_request", "not_found", "method_not_allowed"))
            given.update(("unauthenticated", "request_too_large"))
            stand.engine.failure = StepFailedError("this one")
            ask = {"prompt": "x", "max_tokens": 3}
            assert (await client.post("/v1/completions", json=ask)).status_code == 500
            late = await client.post("/v1/completions", json=ask | {"stream": True})
            assert (late.status_code, "step_failed" in late.text) == (200, True)
            many = await client.post("/v1/completions", json=ask | {"prompt": ["x", "y", "z"]})
            assert many.status_code == 500
            given["step_failed"] += 3
            stand.engine.failure = ValueError("a bug")
            assert (await client.post("/v1/completions", json=ask)).status_code == 500
            given["internal"] += 1
            assert (await client.get("/health")).status_code == 200
        method = stand.channel.unary_unary("/octavo.v1.OctavoService/Generate")
        for message, metadata, reason in (
            (b"", [], "unauthenticated"),
            (b"", list(good.items()), "invalid_request"),
            (b"\xff", list(good.items()), "invalid_request"),
        ):
            with pytest.raises(grpc.aio.AioRpcError):
                await method(message, metadata=metadata)
            given[reason] += 1
        assert stats.refusals == given

    on_stand(scenario, http_port=0, token_file=str(tmp_path / "tokens"))
