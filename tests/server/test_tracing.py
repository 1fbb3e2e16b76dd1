"""Spans of requests, made by the real engine and read from OpenTelemetry's in-memory exporter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from octavo.engine.sampling_params import SamplingParams
from octavo.server.proto.octavo.v1 import octavo_pb2 as pb
from octavo.server.serve import OctavoServer
from octavo.server.serve_config import ServeConfig
from octavo.server.tracing import RequestTracer, exporting_tracer

pytest.importorskip("opentelemetry.sdk")

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Spans:
    """A tracer, and the spans that have ended."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def all(self, name: str) -> list[Any]:
        spans = [span for span in self._exporter.get_finished_spans() if span.name == name]
        return sorted(spans, key=lambda span: span.start_time)

    def request(self) -> Any:
        (span,) = self.all("octavo.request")
        return span

    def events(self) -> list[str]:
        return [event.name for event in self.request().events]


@pytest.fixture(scope="module")
def built(tiny_model: Path) -> Iterator[Any]:
    from octavo.engine.config import EngineConfig
    from octavo.engine.engine import Engine

    engine = Engine(
        EngineConfig(
            model=str(tiny_model), max_num_seqs=4, max_num_batched_tokens=32, num_kv_pages=26,
            block_size=16, warm_up="coarse", fail_on_compile=True, enable_prefix_caching=False,
        )
    )  # fmt: skip
    close, engine.close = engine.close, lambda: None  # type: ignore[method-assign]
    yield engine
    close()


@pytest.fixture
def spans(built: Any) -> Iterator[Spans]:
    spans = Spans()
    built.core.log = RequestTracer(spans.tracer, built.clock, "tiny")
    yield spans
    built.core.log = None


def run(engine: Any, prompt: list[int], params: SamplingParams = PARAMS, name: str = "r") -> None:
    engine.submit(engine.inputs.process(name, prompt, params, now_s=engine.clock.now_s()))
    while engine.has_unfinished:
        engine.step()


def test_a_request_is_one_span_with_its_stages_inside(built: Any, spans: Spans) -> None:
    run(built, list(range(40, 110)))
    whole = spans.request()
    assert spans.events() == ["admitted", "finished"]
    assert whole.attributes["gen_ai.usage.input_tokens"] == 70
    assert whole.attributes["gen_ai.usage.output_tokens"] == 6
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    chunks = spans.all("octavo.prefill")
    assert [chunk.attributes["octavo.start"] for chunk in chunks] == [0, 32, 64]
    assert sum(chunk.attributes["octavo.num_tokens"] for chunk in chunks) == 70
    inside = [*spans.all("octavo.queued"), *chunks, *spans.all("octavo.decode")]
    assert len(inside) == 5
    for span in inside:
        assert span.parent.span_id == whole.context.span_id
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time


def test_no_span_holds_what_was_said(built: Any, spans: Spans) -> None:
    secret = "my secret is 1234"
    engine_ids = built.tokenizer.encode(secret)
    run(built, engine_ids)
    text = repr([(s.name, dict(s.attributes), s.events) for s in [spans.request()]])
    assert "secret" not in text
    assert str(engine_ids[:5]).strip("[]") not in text


def test_a_preempted_request_says_so_and_resumes(built: Any, spans: Spans) -> None:
    long = PARAMS.replace(max_tokens=90)
    for name in ("a", "b", "c", "d"):
        prompt = [50 + ord(name)] * 40
        built.submit(built.inputs.process(name, prompt, long, now_s=built.clock.now_s()))
    while built.has_unfinished:
        built.step()
    events = [event.name for span in spans.all("octavo.request") for event in span.events]
    assert events.count("preempted") == events.count("resumed") > 0
    assert events.count("finished") == 4
    again = [s for s in spans.all("octavo.request") if s.attributes["octavo.num_preemptions"]]
    assert again
    assert not built.core.log._live


def test_a_failed_step_is_an_event_and_a_cancel_an_end(
    built: Any, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    submission = built.inputs.process("r", [60] * 40, PARAMS, now_s=built.clock.now_s())
    built.submit(submission)
    built.step()

    def fail(handle: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(built.executor, "result", fail)
        built.step()
    built.step()
    built.abort(submission.request_id)
    while built.has_unfinished:
        built.step()
    assert spans.events() == ["admitted", "recovered", "resumed", "finished"]
    assert spans.request().attributes["gen_ai.response.finish_reasons"] == ("cancelled",)


def test_a_refused_request_is_a_span_in_error(built: Any, spans: Spans) -> None:
    request = built.inputs.process("late", [60], PARAMS, now_s=0.0, timeout_s=1e-3)
    with pytest.raises(Exception, match="deadline"):
        built.submit(request)
    assert not spans.request().status.is_ok
    assert spans.request().attributes["error.type"] == "DeadlineExceededError"


def test_a_callers_trace_goes_on_over_grpc(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.engine import async_engine

    monkeypatch.setattr(async_engine, "open_engine", lambda config, progress: built)
    spans = Spans()

    async def scenario() -> None:
        server = OctavoServer(ServeConfig(grpc_port=0))
        address = (await server.bind()).grpc
        engine = async_engine.AsyncEngine()
        server.trace(engine, spans.tracer)
        await server.attach(engine)
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=[60, 61]),
            sampling_params=pb.SamplingParams(max_tokens=2),
        )
        async with grpc.aio.insecure_channel(address) as channel:
            await channel.unary_unary("/octavo.v1.OctavoService/Generate")(
                request.SerializeToString(),
                metadata=(("traceparent", f"00-{TRACE}-{SPAN}-01"),),
            )
        await server.drain_and_stop()

    asyncio.run(scenario())
    built.core.log = None
    whole = spans.request()
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == SPAN


def test_a_callers_trace_goes_on_over_http(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    from octavo.engine import async_engine

    monkeypatch.setattr(async_engine, "open_engine", lambda config, progress: built)
    spans = Spans()

    async def scenario() -> None:
        server = OctavoServer(ServeConfig(grpc_port=0, http_port=0))
        url = (await server.bind()).http
        assert url is not None
        engine = async_engine.AsyncEngine()
        server.trace(engine, spans.tracer)
        await server.attach(engine)
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for headers in ({"traceparent": f"00-{TRACE}-{SPAN}-01"}, {}):
                body = {"prompt": [60, 61], "max_tokens": 2}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200
        await server.drain_and_stop()

    asyncio.run(scenario())
    built.core.log = None
    followed, alone = spans.all("octavo.request")
    assert f"{followed.context.trace_id:032x}" == TRACE
    assert f"{followed.parent.span_id:016x}" == SPAN
    assert alone.parent is None


def test_spans_reach_a_collector_over_otlp(built: Any) -> None:
    """The exporter that the setting makes, and a collector that keeps what it is sent."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    received: list[Any] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            received.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    collector = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), collector)
    port = collector.add_insecure_port("127.0.0.1:0")
    collector.start()
    tracer, end = exporting_tracer(f"http://127.0.0.1:{port}")
    built.core.log = RequestTracer(tracer, built.clock, "tiny")
    try:
        run(built, list(range(40, 60)))
    finally:
        built.core.log = None
        end()
        collector.stop(None).wait()
    resources = [resource for request in received for resource in request.resource_spans]
    spans = [span for r in resources for scope in r.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {
        "octavo.request", "octavo.queued", "octavo.prefill", "octavo.decode"
    }  # fmt: skip
    named = {item.key: item.value.string_value for item in resources[0].resource.attributes}
    assert named["service.name"] == "octavo"


def test_without_the_extra_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from octavo.engine.errors import InvalidConfigError

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidConfigError, match="otel"):
        OctavoServer(ServeConfig(grpc_port=0, otlp_traces_endpoint="http://localhost:4317"))
