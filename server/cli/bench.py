"""`octavo bench`: measures an engine on this machine.

- `throughput`: a batch of requests, all at once or as a trace has them;
- `serve`: a running server over HTTP or gRPC, as its clients see it;
- `goodput`: the highest rate at which enough requests are on time, live or simulated;
- `accuracy`: what quantization costs, as perplexity and agreement on a text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from octavo.engine.simulation.workloads.bench_requests import (
    parse_range,
    random_workload,
    trace_workload,
)
from octavo.server.cli import accuracy, bench_serve, goodput
from octavo.server.cli.engine_args import add_engine_args, checked_engine_args


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
    throughput.add_argument("--seed", type=int, default=1, help="of the workload")
    throughput.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_args(throughput, leave_out=("seed",))
    goodput.add_parser(kinds)
    accuracy.add_parser(kinds)
    bench_serve.add_parser(kinds)


def run(args: argparse.Namespace) -> int:
    """Measures, and prints a table or JSON."""
    if args.kind == "goodput":
        return goodput.run(args)
    if args.kind == "accuracy":
        return accuracy.run(args)
    if args.kind == "serve":
        return bench_serve.run(args)
    report = _throughput(args)
    if args.json:
        print(json.dumps(report))
    else:
        _print_table(report)
    return 0


def _throughput(args: argparse.Namespace) -> dict[str, Any]:
    prompt_len = parse_range(args.prompt_len, "prompt_len")
    output_len = parse_range(args.output_len, "output_len")
    begun_s = time.perf_counter()
    from octavo.engine.any_engine import open_engine
    from octavo.engine.engine_arguments import engine_config
    from octavo.engine.measuring.measurement import measure

    # Steady figures: nothing compiles behind while the clock runs.
    config = engine_config(None, {"warm_up": "full"} | checked_engine_args(args))
    engine = open_engine(config, progress=sys.stderr.isatty())
    ready_s = time.perf_counter() - begun_s
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


def _print_table(report: dict[str, Any]) -> None:
    report.pop("compile_s", None)
    for name, value in report.items():
        print(f"{name:24} {_show(value)}")


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_show(item)}" for name, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
