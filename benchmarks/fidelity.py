"""Simulation against the live engine: the same requests, the same policy, this machine.

Serves Poisson arrivals at three loads (shares of the rate at which a batch of them is served) on
the live engine, and plays the same arrivals through a simulation from a profile, host time
included. Prints TTFT and TPOT of both and how far apart they are.

The profile of a load is measured half right before it and half right after it: the speed of a
shared machine drifts by a tenth within minutes, and what is compared here is the simulation with
the engine, not the machine with itself a quarter of an hour ago. Rounds go through the loads again
with other arrivals and other profiles; percentiles are of the requests of all rounds together, as
the p99 of a minute at the low load is that of its one slowest request. Wants a machine that does
nothing else.

By how much the half after a load prices its steps above the half before it is the machine's drift;
a round in which it is more than 5% says so. `--steps` writes every live step beside its price, to
see which steps the profile gets wrong.

    python -m benchmarks.fidelity [--seconds 60] [--rounds 1] [--output FILE] [--steps FILE.csv]
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import about_machine
from octavo.engine.engine import Engine
from octavo.engine.engine_arguments import engine_config
from octavo.engine.measuring.measurement import measure
from octavo.engine.measuring.profiling import (
    Measured,
    RecordingExecutor,
    fit_profile,
    measure_programs,
)
from octavo.engine.process.own_process import prepare_to_compute
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.metrics import percentiles
from octavo.engine.simulation.profile import Profile, Sample
from octavo.engine.simulation.simulate import simulate
from octavo.engine.simulation.workloads.arrivals import gamma_arrivals, uniform_lengths
from octavo.engine.simulation.workloads.bench_requests import (
    BenchRequest,
    parse_range,
    random_workload,
)
from octavo.engine.simulation.workloads.traffic import Arrival

LOADS = {"low": 0.3, "medium": 0.6, "near saturation": 0.9}
PROFILE_SEED = 50_001
"""Of the profile's workloads: other prompts than those that are served."""
MUCH_DRIFT = 0.05
"""By how much the machine may change around a load and still be called the same."""

Steps = Sequence[tuple[Any, Sample]]
"""(the program's shape, what it computed and took) of each step."""


def main() -> None:
    """Measures, simulates and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="(default: the packaged one)")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-batched-tokens", type=int, default=128)
    parser.add_argument("--policy", default="fcfs")
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals, each time")
    parser.add_argument("--rounds", type=int, default=1, help="times that each load is served")
    parser.add_argument("--prompt-len", default="16:128", help="tokens, LOW:HIGH")
    parser.add_argument("--output-len", default="8:64", help="tokens, LOW:HIGH")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", help="write every figure as JSON")
    parser.add_argument("--steps", help="write every live step and its price as CSV")
    args = parser.parse_args()

    prepare_to_compute(os.environ)
    given: dict[str, Any] = {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "scheduling_policy": args.policy,
        "warm_up": "full",  # nothing is compiled behind while this measures
    }
    engine = Engine(engine_config(args.model, given))
    lengths = parse_range(args.prompt_len), parse_range(args.output_len)
    vocab = engine.model_config.vocab_size
    batch = random_workload(3 * args.max_num_seqs, *lengths, vocab, args.seed)
    capacity = measure(engine, batch).report["requests_per_s"]
    print(f"a batch is served at {capacity:.2f} requests a second")
    rounds: dict[str, list[Round]] = {name: [] for name in LOADS}
    priced: list[dict[str, Any]] = []
    # Prompts of the profile that decode together are up to half as long: as long as those served.
    longest = 2 * lengths[0][1]

    def profiled(number: int) -> Measured:
        return measure_programs(
            engine,
            seed=PROFILE_SEED + 1000 * number,
            longest_context=longest,
            part=(number % 2, 2),
        )

    before = profiled(0)
    for number in range(args.rounds * len(LOADS)):
        # Each has prompts of its own: one served before would be in the prefix cache.
        name, seed = list(LOADS)[number % len(LOADS)], args.seed + number
        arrivals = gamma_arrivals(
            LOADS[name] * capacity, args.seconds, uniform_lengths(*lengths), seed=seed,
            prefix="bench-",
        )  # fmt: skip
        served, steps = live(engine, arrivals, seed)
        after = profiled(number + 1)
        profile = fit_profile(engine, (before, after))
        played = simulated(engine, profile, arrivals)
        moved = drift(steps, fit_profile(engine, (before,)), fit_profile(engine, (after,)))
        rounds[name].append(Round(served, played, over_profile(steps, profile), moved))
        priced += [{"load": name, "seed": seed, **row} for row in step_rows(steps, profile)]
        before = after
        show(name, rounds[name][-1:])
        # After every load: what was measured is there, whatever becomes of the rest.
        if args.steps:
            write_steps(args.steps, priced)
        if args.output:
            write_report(args, capacity, rounds)
    if args.rounds > 1:
        for name, found in rounds.items():
            show(f"{name}, {args.rounds} rounds", found)


def write_report(args: argparse.Namespace, capacity: float, rounds: dict[str, list[Round]]) -> None:
    """Writes every figure so far as JSON; `capacity` in requests a second."""
    files = ("output", "steps")
    report = {
        "about": about_machine(),
        "settings": {name: value for name, value in vars(args).items() if name not in files},
        "capacity_requests_per_s": capacity,
        "loads": [
            {
                "load": name,
                "requests_per_s": LOADS[name] * capacity,
                **summary(found),
                "rounds": [
                    summary([each]) | {"steps_over_profile": each.over_profile, "drift": each.drift}
                    for each in found
                ],
            }
            for name, found in rounds.items()
            if found
        ],
    }
    Path(args.output).write_text(json.dumps(report, indent=1) + "\n")


def write_steps(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Writes what `step_rows` gave as CSV."""
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


class Served(NamedTuple):
    """Seconds of each request, and the steps it all took."""

    ttft_s: list[float]
    tpot_s: list[float]
    num_steps: int


class Round(NamedTuple):
    """One load once: on the engine, in simulation, what its steps took beside the profile, and by
    what share the machine became slower around it."""

    live: Served
    simulated: Served
    over_profile: dict[str, float]
    drift: float


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Percentiles of the requests of several rounds together."""
    return {"requests": sum(len(each.live.ttft_s) for each in rounds)} | {
        kind: {
            "ttft_s": percentiles(value for side in sides for value in side.ttft_s),
            "tpot_s": percentiles(value for side in sides for value in side.tpot_s),
            "num_steps": sum(side.num_steps for side in sides),
        }
        for kind, sides in (
            ("live", [each.live for each in rounds]),
            ("simulated", [each.simulated for each in rounds]),
        )
    }


def live(engine: Engine, arrivals: list[Arrival], seed: int) -> tuple[Served, list[Any]]:
    """What the engine does; and its steps."""
    vocab = engine.model_config.vocab_size
    workload = []
    for index, arrival in enumerate(arrivals):
        n = arrival.num_input
        prompt = random_workload(1, (n, n), (1, 1), vocab, seed * 100_000 + index)[0]
        workload.append(
            BenchRequest(prompt.prompt_token_ids, arrival.num_output, arrival.arrival_s)
        )
    recorder = RecordingExecutor(engine.core.executor)
    engine.core.executor = recorder
    outputs = measure(engine, workload).outputs
    engine.core.executor = engine.executor
    ttft = [output.metrics.ttft_s for output in outputs if output.metrics.ttft_s is not None]
    tpot = [output.metrics.tpot_s(len(output.outputs[0].token_ids)) for output in outputs]
    spoken = [value for value in tpot if value is not None]
    return Served(ttft, spoken, len(recorder.samples)), recorder.samples


def over_profile(steps: Steps, profile: Profile) -> dict[str, float]:
    """Measured time of steps over what the profile prices them at, by kind of program."""
    sums: dict[str, tuple[float, float]] = {}
    for shape, sample in steps:
        for kind in ("all", program_name(shape)):
            real, priced = sums.get(kind, (0.0, 0.0))
            sums[kind] = real + sample.seconds, priced + profile.seconds(sample.work)
    return {kind: real / priced for kind, (real, priced) in sums.items()}


def drift(steps: Steps, before: Profile, after: Profile) -> float:
    """By what share a later profile prices the steps above an earlier one."""
    first, last = (sum(p.seconds(sample.work) for _, sample in steps) for p in (before, after))
    return last / first - 1


def step_rows(steps: Steps, profile: Profile) -> list[dict[str, Any]]:
    """Each step's program, what was in it, its seconds and its price."""
    return [
        {
            "program": program_name(shape),
            **sample.work._asdict(),
            "seconds": round(sample.seconds, 6),
            "priced_s": round(profile.seconds(sample.work), 6),
        }
        for shape, sample in steps
    ]


def program_name(shape: Any) -> str:
    """Kind and size: "decode 8" (rows), "mixed 128" (tokens)."""
    return f"{'decode' if shape.is_decode else 'mixed'} {shape.num_tokens}"


def simulated(engine: Engine, profile: Profile, arrivals: list[Arrival]) -> Served:
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
    return Served(
        [record.ttft_s for record in report.records if record.ttft_s is not None],
        [record.tpot_s for record in report.records if record.tpot_s is not None],
        report.num_steps,
    )


def show(title: str, rounds: Sequence[Round]) -> None:
    """One load as a few lines."""
    row = summary(rounds)
    print(f"{title}, {row['requests']} requests")
    if len(rounds) == 1:
        ratios, moved = rounds[0].over_profile, rounds[0].drift
        warning = ", too much to compare" if abs(moved) > MUCH_DRIFT else ""
        print(f"  drift of the machine around it: {100 * moved:+.1f}%{warning}")
        print("  steps over profile: " + ", ".join(f"{k} {v:.2f}" for k, v in ratios.items()))
    print(f"  steps: live {row['live']['num_steps']}, simulated {row['simulated']['num_steps']}")
    for figure in ("ttft_s", "tpot_s"):
        for percentile in ("p50", "p99"):
            real, played = row["live"][figure][percentile], row["simulated"][figure][percentile]
            print(
                f"  {figure[:4].upper()} {percentile}  live {1e3 * real:8.1f} ms  "
                f"simulated {1e3 * played:8.1f} ms  {100 * (played / real - 1):+.0f}%",
                flush=True,
            )


if __name__ == "__main__":
    main()
