"""OpenTelemetry traces of requests: a span each, with what happened to it inside.

::

    octavo.request                     from acceptance to the terminal event
    ├── octavo.queued                  until it is first given a row, and again after a preemption
    ├── octavo.prefill                 one a chunk, from its plan to its commit
    └── octavo.decode                  from the first token; ends with a preemption or the request

Events of the request's span: admitted, preempted, resumed, recovered, finished. The engine's loop
calls `RequestTracer` in its own thread; the exporter works in another. Off unless asked for: needs
the extra `otel`. No prompt or answer is ever in a span.

Source: the span attributes follow OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import grpc

from octavo.engine.clock import Clock
from octavo.engine.errors import InvalidConfigError
from octavo.engine.executor import TransferDone
from octavo.engine.request import Request
from octavo.engine.scheduler.forced_tokens import Unblocked
from octavo.engine.scheduler.step_plan import StepPlan, StepResult

TRACE_PARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The W3C trace context that the current call came with."""


@dataclass(slots=True)
class _Traced:
    """A live request's spans."""

    request: Request
    root: Any
    queued: Any = None
    decode: Any = None
    chunks: dict[int, Any] = field(default_factory=dict)


class RequestTracer:
    """Listens to the engine's loop and makes spans of what it hears.

    Args:
        tracer: of OpenTelemetry.
        clock: the engine's.
        model: name of the served model.
    """

    def __init__(self, tracer: Any, clock: Clock, model: str) -> None:
        self._tracer = tracer
        self._offset_s = time.time() - clock.now_s()
        self._model = model
        self._live: dict[str, _Traced] = {}

    # What the loop tells.

    def added(self, request: Request, now_s: float, refusal: Exception | None) -> None:
        """A request was accepted, or refused."""
        root = self._begin("octavo.request", request.arrival_s, _parent(request))
        root.set_attributes(
            {
                "gen_ai.request.model": self._model,
                "gen_ai.request.id": request.label or request.request_id,
                "octavo.engine_id": request.request_id,
                "gen_ai.request.max_tokens": request.max_tokens,
                "gen_ai.usage.input_tokens": request.num_prompt_tokens,
                "octavo.priority": request.priority.name.lower(),
            }
        )
        if refusal is not None:
            root.add_event("refused", {"error": type(refusal).__name__}, self._ns(now_s))
            self._end_as(root, type(refusal).__name__, now_s)
            return
        traced = _Traced(request, root)
        traced.queued = self._begin("octavo.queued", now_s, root)
        self._live[request.request_id] = traced

    def cancelled(self, request_id: str, status: str, found: bool, now_s: float) -> None:
        """A request was ended from outside."""
        if found:
            self._end(request_id, now_s)

    def finished(self, request_id: str, stop_reason: Any, found: bool, now_s: float) -> None:
        """A request's text met a stop string."""
        if found:
            self._end(request_id, now_s)

    def turned(
        self,
        plan: StepPlan | None,
        transfers: Sequence[TransferDone],
        ready: Sequence[Unblocked],
        ended: Iterable[Request],
        now_s: float,
    ) -> None:
        """A step was planned; `ended` were given up or ran out of time."""
        for request in ended:
            self._end(request.request_id, now_s)
        if plan is None:
            return
        for request_id in plan.preempted:
            traced = self._live.get(request_id)
            if traced is not None and traced.queued is None:
                self._event(traced, "preempted", now_s)
                self._stop(traced, "decode", now_s)
                traced.queued = self._begin("octavo.queued", now_s, traced.root)
        for row in plan.prefill_rows:
            traced = self._live.get(row.request.request_id)
            if traced is None:
                continue
            if traced.queued is not None:
                again = row.request.metrics.num_preemptions > 0
                self._event(traced, "resumed" if again else "admitted", now_s)
                self._stop(traced, "queued", now_s)
            span = self._begin("octavo.prefill", now_s, traced.root)
            span.set_attributes({"octavo.start": row.start, "octavo.num_tokens": row.num_tokens})
            traced.chunks[plan.step_id] = span

    def committed(
        self, plan: StepPlan, result: StepResult, ended: Iterable[Request], now_s: float
    ) -> None:
        """A step's tokens are known."""
        for row in plan.prefill_rows:
            traced = self._live.get(row.request.request_id)
            if traced is None:
                continue
            span = traced.chunks.pop(plan.step_id, None)
            if span is not None:
                span.end(self._ns(now_s))
            if row.samples and traced.queued is None and not row.request.status.is_finished:
                traced.decode = self._begin("octavo.decode", now_s, traced.root)
        for request in ended:
            self._end(request.request_id, now_s)

    def failed(self, broken: Iterable[str], now_s: float) -> None:
        """Every step on its way was lost: all that had a row wait again."""
        for traced in self._live.values():
            if traced.queued is None:
                self._event(traced, "recovered", now_s)
                self._stop(traced, "decode", now_s)
                self._stop_chunks(traced, now_s)
                traced.queued = self._begin("octavo.queued", now_s, traced.root)

    def only(self, request_ids: Iterable[str] | None, now_s: float) -> None:
        """Some are tried apart: nothing to tell."""

    def pages_named(self, request_id: str, now_s: float) -> None:
        """Pages may go to another engine: nothing to tell."""

    def pages_wanted(self, names: object, transfer_id: int | None, now_s: float) -> None:
        """Pages go to another engine: no request's matter."""

    def pages_came(self, names: object, host_pages: object, now_s: float) -> None:
        """Pages came from another engine: no request's matter."""

    def _end(self, request_id: str, now_s: float) -> None:
        traced = self._live.pop(request_id, None)
        if traced is None:
            return
        request = traced.request
        self._stop(traced, "queued", now_s)
        self._stop(traced, "decode", now_s)
        self._stop_chunks(traced, now_s)
        metrics = request.metrics
        traced.root.set_attributes(
            {
                "gen_ai.usage.output_tokens": len(request.output_token_ids),
                "gen_ai.response.finish_reasons": [request.status.value],
                "octavo.num_cached_tokens": request.num_cached_tokens,
                "octavo.num_preemptions": metrics.num_preemptions,
            }
        )
        if metrics.ttft_s is not None:
            traced.root.set_attribute("gen_ai.server.time_to_first_token", metrics.ttft_s)
        self._event(traced, "finished", now_s)
        error = None if request.error is None else type(request.error).__name__
        self._end_as(traced.root, error, now_s)

    def _end_as(self, span: Any, error: str | None, now_s: float) -> None:
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, error))
            span.set_attribute("error.type", error)
        span.end(self._ns(now_s))

    def _event(self, traced: _Traced, name: str, now_s: float) -> None:
        traced.root.add_event(name, timestamp=self._ns(now_s))

    def _stop(self, traced: _Traced, name: str, now_s: float) -> None:
        span = getattr(traced, name)
        if span is not None:
            span.end(self._ns(now_s))
            setattr(traced, name, None)

    def _stop_chunks(self, traced: _Traced, now_s: float) -> None:
        for span in traced.chunks.values():
            span.end(self._ns(now_s))
        traced.chunks.clear()

    def _begin(self, name: str, now_s: float, parent: Any) -> Any:
        from opentelemetry.trace import set_span_in_context

        has_span = hasattr(parent, "get_span_context")
        context = set_span_in_context(parent) if has_span else parent
        return self._tracer.start_span(name, context=context, start_time=self._ns(now_s))

    def _ns(self, now_s: float) -> int:
        return int((now_s + self._offset_s) * 1e9)


def _parent(request: Request) -> Any:
    """The caller's context; an empty one, and so a trace of its own, if there is none."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not request.trace_parent:
        return Context()
    header = {"traceparent": request.trace_parent}
    return TraceContextTextMapPropagator().extract(header, Context())


def exporting_tracer(endpoint: str) -> tuple[Any, Callable[[], None]]:
    """A tracer that sends spans to an OTLP collector over gRPC, and what ends it.

    Raises:
        InvalidConfigError: the extra `otel` is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        allowed = f"not given, unless octavo[otel] is installed ({error})"
        raise InvalidConfigError("otlp_traces_endpoint", endpoint, allowed) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "octavo"}))
    insecure = not endpoint.startswith("https://")
    provider.add_span_processor(
        BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=insecure))
    )
    return provider.get_tracer("octavo"), provider.shutdown


class TraceInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Keeps the call's `traceparent` for whoever begins its request."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The call's own handler."""
        metadata: Sequence[tuple[str, Any]] = handler_call_details.invocation_metadata or ()
        header = dict(metadata).get("traceparent")
        TRACE_PARENT.set(header if isinstance(header, str) else None)
        return await continuation(handler_call_details)
