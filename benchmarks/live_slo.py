"""Interactive requests beside a job of long ones, live: policies in turn on one engine each.

At time 0 a job of long prompts arrives; short interactive requests with targets for their first
token and their rate come at random times while it is served. All is offered to each policy in
turn, several rounds, every other round backwards. Prints the interactive requests' TTFT, what was
refused, and total tokens a second until the last request has ended.

    python benchmarks/live_slo.py [--policies "fcfs slo"] [--rounds 2] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
from pathlib import Path
from typing import Any

from machine import about_machine

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine_arguments import engine_config
from octavo.engine.measuring.open_loop import OpenLoopRun, run_open_loop
from octavo.engine.process.own_process import prepare_to_compute
from octavo.engine.simulation.metrics import percentiles
from octavo.engine.simulation.workloads.arrivals import gamma_arrivals, uniform_lengths
from octavo.engine.simulation.workloads.bench_requests import parse_range
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass


def main() -> None:
    """Measures and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="(default: the packaged one)")
    parser.add_argument("--policies", default="fcfs slo", help="the first is compared against")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--job-requests", type=int, default=32)
    parser.add_argument("--job-prompt-len", default="600:1000", help="tokens, LOW:HIGH")
    parser.add_argument("--job-output-len", default="32:64", help="tokens, LOW:HIGH")
    parser.add_argument("--rate", type=float, default=1.0, help="interactive requests a second")
    parser.add_argument("--seconds", type=float, default=40.0, help="they keep coming")
    parser.add_argument("--prompt-len", default="16:64", help="tokens, LOW:HIGH")
    parser.add_argument("--output-len", default="8:32", help="tokens, LOW:HIGH")
    parser.add_argument("--ttft-s", type=float, default=2.0, help="their target")
    parser.add_argument("--tpot-s", type=float, default=0.5, help="their target")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", help="write every figure as JSON")
    args = parser.parse_args()
    rounds = asyncio.run(_measure(args))
    policies = args.policies.split()
    report = {policy: _pooled([round_[policy] for round_ in rounds]) for policy in policies}
    base = report[policies[0]]
    for policy, row in report.items():
        print(
            f"{policy}: interactive TTFT p50 {row['ttft_s']['p50']:.2f} s, "
            f"p99 {row['ttft_s']['p99']:.2f} s "
            f"({base['ttft_s']['p99'] / row['ttft_s']['p99']:.1f}x lower than {policies[0]}'s), "
            f"TPOT p99 {1e3 * row['tpot_s']['p99']:.0f} ms, on time {row['attainment']:.0%}, "
            f"refused {row['refused']}, failed {row['failed']}; "
            f"{row['tokens_per_s']:.0f} tokens/s "
            f"({row['tokens_per_s'] / base['tokens_per_s']:.3f}x)"
        )
    if args.output:
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        text = json.dumps(
            {
                "about": about_machine(),
                "settings": settings,
                "policies": {name: _without_lists(row) for name, row in report.items()},
                "rounds": rounds,
            },
            indent=1,
        )
        Path(args.output).write_text(text + "\n")


def workload(args: argparse.Namespace, seed: int) -> list[Arrival]:
    """The job at time 0 and the interactive requests, by arrival."""
    interactive = gamma_arrivals(
        args.rate,
        args.seconds,
        uniform_lengths(parse_range(args.prompt_len), parse_range(args.output_len)),
        seed=seed,
        traffic_class=TrafficClass(
            name="interactive", ttft_target_s=args.ttft_s, tpot_target_s=args.tpot_s
        ),
        prefix="interactive-",
    )
    lengths = uniform_lengths(parse_range(args.job_prompt_len), parse_range(args.job_output_len))
    job = gamma_arrivals(
        args.job_requests / 1e-3,
        1.0,
        lengths,
        seed=seed + 1,
        traffic_class=TrafficClass(name="job", e2e_target_s=600.0),
        prefix="job-",
    )[: args.job_requests]
    return sorted([*job, *interactive], key=lambda arrival: arrival.arrival_s)


async def _measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    prepare_to_compute(os.environ)
    engines = {}
    for policy in args.policies.split():
        given = {
            "scheduling_policy": policy,
            "max_num_seqs": args.max_num_seqs,
            "max_model_len": 2048,
            "warm_up": "full",
        }
        engines[policy] = AsyncEngine(engine_config(args.model, given))
    rounds = []
    for turn in range(-1, args.rounds):
        arrivals = workload(args, args.seed + 10 * turn)
        if turn < 0:
            # A short round before the first that counts: what is learned online is learned.
            arrivals = arrivals[: len(arrivals) // 3]
        order = list(engines) if turn % 2 == 0 else list(reversed(engines))
        figures = {}
        for policy in order:
            run = await run_open_loop(engines[policy], arrivals, seed=args.seed + turn)
            figures[policy] = _figures(run)
            print(f"round {turn} {policy}: {_without_lists(figures[policy])}", flush=True)
        if turn >= 0:
            rounds.append(figures)
    for engine in engines.values():
        await engine.shutdown()
    return rounds


def _figures(run: OpenLoopRun) -> dict[str, Any]:
    """One run's. An interactive request without a first token waited for ever."""
    interactive = [r for r in run.records if r.traffic_class.name == "interactive"]
    ttfts_s = [math.inf if r.ttft_s is None else r.ttft_s for r in interactive]
    tpots_s = [r.tpot_s for r in interactive if r.tpot_s is not None]
    served = [r for r in run.records if r.is_served]
    return {
        "ttft_s": percentiles(ttfts_s),
        "tpot_s": percentiles(tpots_s),
        "on_time": sum(r.is_on_time for r in interactive),
        "interactive": len(interactive),
        "refused": sum(r.status == "rejected" for r in run.records),
        "failed": sum(r.status == "failed" for r in run.records),
        "offered": len(run.records),
        "seconds": run.duration_s,
        "tokens": sum(r.num_input + r.num_output for r in served),
        "ttfts_s": ttfts_s,
        "tpots_s": tpots_s,
    }


def _pooled(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles over the requests of all rounds, and sums of what is counted."""
    sums: dict[str, Any] = {
        name: sum(figures[name] for figures in rounds)
        for name in ("on_time", "interactive", "refused", "failed", "offered", "seconds", "tokens")
    }
    return sums | {
        "ttft_s": percentiles(value for figures in rounds for value in figures["ttfts_s"]),
        "tpot_s": percentiles(value for figures in rounds for value in figures["tpots_s"]),
        "attainment": sums["on_time"] / sums["interactive"],
        "tokens_per_s": sums["tokens"] / sums["seconds"],
    }


def _without_lists(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if not isinstance(value, list)}


if __name__ == "__main__":
    main()
