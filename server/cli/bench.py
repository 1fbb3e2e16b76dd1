"""`octavo bench`: measures an engine on this machine.

- `throughput`: a batch of requests, all at once or as a trace has them;
- `serve`: a running server over HTTP or gRPC, as its clients see it;
- `goodput`: the highest rate at which enough requests are on time, live or simulated;
- `accuracy`: what quantization costs, as perplexity and agreement on a text;
- `prefix`: time to first token against the length of a shared prefix, cache on and off.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from octavo.engine.simulation.workloads.bench_requests import (
    parse_range,
    random_workload,
    trace_workload,
)
from octavo.server.cli import accuracy, bench_serve, goodput
from octavo.server.cli.engine_args import add_engine_args, checked_engine_args

if TYPE_CHECKING:
    from octavo.engine.any_engine import AnyEngine

PREFIX_LENGTHS = (0, 64, 128, 256, 512, 1024)
PREFIX_TAIL = 16
"""Tokens of each prompt that are its own."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `bench` and what it measures."""
    parser = subparsers.add_parser("bench", help="measure throughput", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    throughput = kinds.add_parser("throughput", help="a batch of requests")
    throughput.add_argument("--num-prompts", type=int, default=128)
    throughput.add_argument("--prompt-len", default="16:256", help="tokens, LOW:HIGH")
    throughput.add_argument("--output-len", default="16:128", help="tokens, LOW:HIGH")
    throughput.add_argument("--trace", help="a trace or a table of lengths (docs/simulation.md)")
    throughput.add_argument("--shared-prefix-len", type=int, default=0)
    throughput.add_argument("--record", metavar="FILE", help="write the event log there")
    goodput.add_parser(kinds)
    accuracy.add_parser(kinds)
    bench_serve.add_parser(kinds)
    prefix = kinds.add_parser("prefix", help="first token against shared prefix length")
    prefix.add_argument("--num-prompts", type=int, default=8, help="prompts a length")
    for kind in (throughput, prefix):
        kind.add_argument("--seed", type=int, default=1, help="of the workload")
        kind.add_argument("--json", action="store_true", help="print one JSON object")
        add_engine_args(kind, leave_out=("seed",))


def run(args: argparse.Namespace) -> int:
    """Measures, and prints a table or JSON."""
    if args.kind == "goodput":
        return goodput.run(args)
    if args.kind == "accuracy":
        return accuracy.run(args)
    if args.kind == "serve":
        return bench_serve.run(args)
    report = _throughput(args) if args.kind == "throughput" else _prefix(args)
    if args.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 0


def _engine(args: argparse.Namespace, **changes: Any) -> tuple[AnyEngine, float]:
    begun_s = time.perf_counter()
    from octavo.engine.any_engine import open_engine
    from octavo.engine.engine_arguments import engine_config

    # Steady figures: nothing compiles behind while the clock runs.
    config = engine_config(None, {"warm_up": "full"} | checked_engine_args(args) | changes)
    engine = open_engine(config, progress=sys.stderr.isatty())
    return engine, time.perf_counter() - begun_s


def _throughput(args: argparse.Namespace) -> dict[str, Any]:
    prompt_len = parse_range(args.prompt_len, "prompt_len")
    output_len = parse_range(args.output_len, "output_len")
    engine, ready_s = _engine(args)
    from octavo.engine.measuring.measurement import measure

    vocab_size = engine.model_config.vocab_size
    if args.trace is not None:
        workload = trace_workload(
            args.trace, args.num_prompts, args.seed, vocab_size, engine.max_model_len
        )
    else:
        workload = random_workload(
            args.num_prompts, prompt_len, output_len, vocab_size, args.seed, args.shared_prefix_len
        )
    if args.record is not None:
        from octavo.engine.any_engine import engine_of_this_process
        from octavo.engine.observability.event_log import start_log

        recorded = engine_of_this_process(engine, "record", args.record)
        start_log(recorded.core, engine.config, args.record)
    report = measure(engine, workload).report
    return {
        "model": engine.model_name,
        "ready_s": ready_s,
        "compile_s": dict(engine.compile_s),
        **report,
    }


def _prefix(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.engine.measuring.measurement import measure, percentiles

    rows: list[dict[str, Any]] = []
    for enabled in (False, True):
        engine, _ = _engine(args, enable_prefix_caching=enabled)
        for length in PREFIX_LENGTHS:
            if length + PREFIX_TAIL + 1 > engine.max_model_len:
                continue
            total = length + PREFIX_TAIL
            workload = random_workload(
                args.num_prompts,
                (total, total),
                (1, 1),
                engine.model_config.vocab_size,
                args.seed + length,
                length,
            )
            measure(engine, workload[:1])  # whoever comes first fills the cache
            ttft = [measure(engine, [request]).report["ttft_ms"]["p50"] for request in workload[1:]]
            rows.append(
                {"prefix_caching": enabled, "prefix_len": length, "ttft_ms": percentiles(ttft)}
            )
    return {"ttft_by_prefix": rows}


def _print_table(report: dict[str, Any]) -> None:
    for row in report.pop("ttft_by_prefix", ()):
        cache = "on" if row["prefix_caching"] else "off"
        print(f"cache {cache:3}  prefix {row['prefix_len']:5}  TTFT {_show(row['ttft_ms'])} ms")
    report.pop("compile_s", None)
    for name, value in report.items():
        print(f"{name:24} {_show(value)}")


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_show(item)}" for name, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
