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
import statistics
from pathlib import Path
from typing import Any

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.engine import engine_config
from octavo.engine.open_loop import OpenLoopRun, run_open_loop
from octavo.engine.simulation.arrivals import gamma_arrivals, uniform_lengths
from octavo.engine.simulation.metrics import percentiles
from octavo.engine.simulation.traffic import Arrival, TrafficClass
from octavo.engine.simulation.workload import parse_range


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
    report = {policy: _merged([round_[policy] for round_ in rounds]) for policy in policies}
    for policy in policies:
        base, row = report[policies[0]], report[policy]
        print(
            f"{policy}: interactive TTFT p50 {row['ttft_s']['p50']:.2f} s, "
            f"p99 {row['ttft_s']['p99']:.2f} s "
            f"({base['ttft_s']['p99'] / row['ttft_s']['p99']:.1f}x lower than {policies[0]}'s), "
            f"TPOT p99 {1e3 * row['tpot_s']['p99']:.0f} ms, refused {row['refused']}; "
            f"{row['tokens_per_s']:.0f} tokens/s "
            f"({row['tokens_per_s'] / base['tokens_per_s']:.3f}x)"
        )
    if args.output:
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        text = json.dumps({"settings": settings, "policies": report, "rounds": rounds}, indent=1)
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
        # One round before the first that counts: what is learned online is learned.
        arrivals = workload(args, args.seed + 10 * max(turn, 0))
        order = list(engines) if turn % 2 == 0 else list(reversed(engines))
        figures = {}
        for policy in order:
            run = await run_open_loop(engines[policy], arrivals, seed=args.seed + turn)
            figures[policy] = _figures(run, arrivals)
            print(f"round {turn} {policy}: {json.dumps(figures[policy])}", flush=True)
        if turn >= 0:
            rounds.append(figures)
    for engine in engines.values():
        await engine.shutdown()
    return rounds


def _figures(run: OpenLoopRun, arrivals: list[Arrival]) -> dict[str, Any]:
    interactive = [r for r in run.records if r.traffic_class.name == "interactive"]
    served = [r for r in run.records if r.is_served]
    num_tokens = sum(r.num_input + r.num_output for r in served)
    return {
        "ttft_s": percentiles(r.ttft_s for r in interactive if r.ttft_s is not None),
        "tpot_s": percentiles(r.tpot_s for r in interactive if r.tpot_s is not None),
        "attainment": sum(r.is_on_time for r in interactive) / len(interactive),
        "refused": sum(r.status == "rejected" for r in run.records),
        "failed": sum(r.status == "failed" for r in run.records),
        "offered": len(arrivals),
        "seconds": run.duration_s,
        "tokens_per_s": num_tokens / run.duration_s,
    }


def _merged(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over rounds, and sums of what is counted."""
    merged: dict[str, Any] = {}
    for name in rounds[0]:
        values = [figures[name] for figures in rounds]
        if isinstance(values[0], dict):
            merged[name] = {key: statistics.mean(v[key] for v in values) for key in values[0]}
        elif name in ("refused", "failed", "offered"):
            merged[name] = sum(values)
        else:
            merged[name] = statistics.mean(values)
    return merged


if __name__ == "__main__":
    main()
