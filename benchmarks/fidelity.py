"""Simulation against the live engine: the same requests, the same policy, this machine.

Profiles the machine, then serves Poisson arrivals at three loads (shares of the rate at which a
batch of them is served) on the live engine, and plays the same arrivals through a simulation from
the profile, host time included. Prints TTFT and TPOT of both and how far apart they are. Wants a
machine that does nothing else.

    python benchmarks/fidelity.py [--requests 200] [--profile FILE] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from octavo.engine.engine import Engine, engine_config
from octavo.engine.measurement import measure
from octavo.engine.profiling import profile_engine
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.arrivals import gamma_arrivals, uniform_lengths
from octavo.engine.simulation.metrics import percentiles
from octavo.engine.simulation.profile import Profile
from octavo.engine.simulation.simulate import simulate
from octavo.engine.simulation.traffic import Arrival
from octavo.engine.simulation.workload import BenchRequest, parse_range, random_workload

LOADS = {"low": 0.3, "medium": 0.6, "near saturation": 0.9}


def main() -> None:
    """Measures, simulates and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="(default: the packaged one)")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=128)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--requests", type=int, default=200, help="at each load")
    parser.add_argument("--prompt-len", default="16:128", help="tokens, LOW:HIGH")
    parser.add_argument("--output-len", default="8:64", help="tokens, LOW:HIGH")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--profile", help="read this one, or write it if it is not there")
    parser.add_argument("--output", help="write every figure as JSON")
    args = parser.parse_args()

    given: dict[str, Any] = {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "scheduling_policy": args.policy,
    }
    engine = Engine(engine_config(args.model, given))
    if args.profile and Path(args.profile).exists():
        profile = Profile.load(args.profile)
    else:
        profile = profile_engine(engine, repeats=2)
        if args.profile:
            profile.save(args.profile)
    lengths = parse_range(args.prompt_len), parse_range(args.output_len)
    vocab = engine.model_config.vocab_size
    batch = random_workload(3 * args.max_num_seqs, *lengths, vocab, args.seed)
    capacity = measure(engine, batch).report["requests_per_s"]
    print(f"a batch is served at {capacity:.2f} requests a second")
    rows = []
    for name, share in LOADS.items():
        rate = share * capacity
        arrivals = gamma_arrivals(
            rate, args.requests / rate, uniform_lengths(*lengths), seed=args.seed, prefix="bench-"
        )
        rows.append(
            {
                "load": name,
                "requests_per_s": rate,
                "live": live(engine, arrivals, args.seed),
                "simulated": simulated(engine, profile, arrivals),
            }
        )
        show(rows[-1])
    if args.output:
        Path(args.output).write_text(json.dumps({"capacity": capacity, "loads": rows}, indent=1))


def live(engine: Engine, arrivals: list[Arrival], seed: int) -> dict[str, Any]:
    """TTFT and TPOT on the engine, in seconds."""
    vocab = engine.model_config.vocab_size
    workload = []
    for index, arrival in enumerate(arrivals):
        n = arrival.num_input
        prompt = random_workload(1, (n, n), (1, 1), vocab, seed * 100_000 + index)[0]
        workload.append(
            BenchRequest(prompt.prompt_token_ids, arrival.num_output, arrival.arrival_s)
        )
    outputs = measure(engine, workload).outputs
    ttft = [output.metrics.ttft_s for output in outputs if output.metrics.ttft_s is not None]
    tpot = [output.metrics.tpot_s(len(output.outputs[0].token_ids)) for output in outputs]
    return {
        "ttft_s": percentiles(ttft),
        "tpot_s": percentiles(value for value in tpot if value is not None),
    }


def simulated(engine: Engine, profile: Profile, arrivals: list[Arrival]) -> dict[str, Any]:
    """The same in simulation: the engine's own limits and settings."""
    config = engine.config
    scheduler = Scheduler(
        engine.limits,
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        watermark=config.watermark,
        num_decode_steps=config.num_decode_steps,
    )
    report = simulate(
        arrivals,
        scheduler,
        profile,
        overlap=config.overlap,
        host=profile.host,
        max_tokens=None,  # as the bench does: every request's limit is its length
    )
    summary = report.summary()
    return {"ttft_s": summary["ttft_s"], "tpot_s": summary["tpot_s"]}


def show(row: dict[str, Any]) -> None:
    """One load as a few lines."""
    print(f"{row['load']}, {row['requests_per_s']:.2f} requests a second")
    for figure in ("ttft_s", "tpot_s"):
        for percentile in ("p50", "p99"):
            real, played = row["live"][figure][percentile], row["simulated"][figure][percentile]
            print(
                f"  {figure[:4].upper()} {percentile}  live {1e3 * real:8.1f} ms  "
                f"simulated {1e3 * played:8.1f} ms  {100 * (played / real - 1):+.0f}%"
            )


if __name__ == "__main__":
    main()
