"""Runs a workload through an engine and says how it went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.engine.any_engine import AnyEngine
from octavo.engine.output.outputs import RequestOutput
from octavo.engine.sampling_params import RequestOutputKind, SamplingParams
from octavo.engine.simulation.metrics import percentiles
from octavo.engine.simulation.workloads.bench_requests import BenchRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One run of a workload.

    Attributes:
        duration_s: first submission to last token.
        outputs: final outputs, in the workload's order.
        report: figures fit for JSON; rates a second, times in milliseconds, shares 0 to 1.
    """

    duration_s: float
    outputs: list[RequestOutput]
    report: dict[str, Any]


def measure(engine: AnyEngine, workload: Sequence[BenchRequest]) -> Measurement:
    """Serves a workload, each request submitted when it arrives, greedily, past end of sequence.

    Args:
        engine: warmed up, idle.
        workload: requests by arrival, in seconds from now.

    Returns:
        Figures of this run alone: counters are read before and after.
    """
    before = engine.load()
    begun_s = engine.clock.now_s()
    finished: dict[str, RequestOutput] = {}
    engine_ids: dict[int, str] = {}
    waste: list[tuple[float, float]] = []
    pending = sorted(range(len(workload)), key=lambda i: workload[i].arrival_s)
    pending.reverse()
    while len(finished) < len(workload):
        now_s = engine.clock.now_s()
        while pending and begun_s + workload[pending[-1]].arrival_s <= now_s:
            index = pending.pop()
            engine_ids[index] = _submit(engine, workload[index], begun_s)
        for output in engine.step():
            finished[output.engine_id] = output
        waste.append(engine.held_pages())
    duration_s = engine.clock.now_s() - begun_s
    engine.check_integrity()
    outputs = [finished[engine_ids[index]] for index in range(len(workload))]
    return Measurement(
        duration_s=duration_s,
        outputs=outputs,
        report=_report(engine, before, outputs, duration_s, waste),
    )


def _submit(engine: AnyEngine, request: BenchRequest, begun_s: float) -> str:
    """Hands a request over; returns the engine's id of it."""
    submission = engine.inputs.process(
        None,
        list(request.prompt_token_ids),
        SamplingParams(
            temperature=0.0,
            max_tokens=request.max_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        ),
        now_s=begun_s + request.arrival_s,
    )
    engine.submit(submission)
    return submission.request_id


def _report(
    engine: AnyEngine,
    before: Any,
    outputs: list[RequestOutput],
    duration_s: float,
    waste: list[tuple[float, float]],
) -> dict[str, Any]:
    after = engine.load()
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    ttft = [1e3 * (output.metrics.ttft_s or 0.0) for output in outputs]
    tpot = [
        1e3 * value
        for output, count in zip(outputs, counts, strict=True)
        if (value := output.metrics.tpot_s(count)) is not None
    ]
    pages = sum(owned for owned, _ in waste)
    return {
        "num_requests": len(outputs),
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": sum(counts),
        "duration_s": duration_s,
        "output_tokens_per_s": sum(counts) / duration_s,
        "total_tokens_per_s": (num_prompt + sum(counts)) / duration_s,
        "requests_per_s": len(outputs) / duration_s,
        "ttft_ms": percentiles(ttft),
        "tpot_ms": percentiles(tpot),
        "kv_waste": sum(owned * share for owned, share in waste) / pages if pages else 0.0,
        "padding_waste": after.padding_waste,
        "compiles_after_ready": after.compiles_after_ready - before.compiles_after_ready,
        "host_ms_per_step": 1e3 * after.host_s_per_step,
        "device_idle_share": after.device_idle_share,
        "num_preemptions": after.num_preemptions - before.num_preemptions,
        "prefix_cache_hits": after.prefix_cache_hits - before.prefix_cache_hits,
    }
