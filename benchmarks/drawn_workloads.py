"""`slo` against rivals over workloads that nobody chose: each is drawn by a number.

    python -m benchmarks.drawn_workloads 0:20
    python -m benchmarks.drawn_workloads 13 --loads 1,1.6,2.5 --num-requests 600

A number draws a machine (its speed, rows, KV), one to three classes of requests (lengths, targets,
priorities, tenants, prompts that begin alike) and how they arrive. Rivals are not tuned: a few
fixed configurations of each stand beside `slo`, and the best of them, chosen after the runs, is
compared; which favours the rivals, as chance does. A load of 1 is about the rate at which the best
of three probes falls below 0.88. Of the policies `slo` alone is fair to tenants, which the count of
requests on time does not know. Prints a line for each drawn workload and load; ends with status 1
if `slo` is behind in any of them by more than `--margin`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.goodput_matrix.runs import has_target
from octavo.engine.request import Priority
from octavo.engine.simulation.executor import SwapLink
from octavo.engine.simulation.goodput import Candidate, run_once
from octavo.engine.simulation.settings import Setting, replica_limits
from octavo.engine.simulation.step_time import (
    NIYAMA_STEP_TIME,
    LinearCost,
    StepTime,
    TwoRegimeStepTime,
)
from octavo.engine.simulation.workloads.prompts import Segment, stream_of
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

RIVALS = tuple(
    Candidate(policy=policy, token_budget=budget)
    for policy, budget in (
        ("fcfs", 512), ("fcfs-shed:begun=drop", 256), ("fcfs-shed:begun=drop", 512),
        ("edf-shed:begun=drop", 256), ("edf-shed:begun=drop", 512), ("edf", 1024), ("sjf", 512),
        ("least-slack", 512), ("priority", 512), ("niyama", None), ("niyama:alpha=0", None),
        ("niyama:alpha=8", None),
    )
)  # fmt: skip
PROBES = (RIVALS[0], RIVALS[4], RIVALS[9])
SEEDS = (11, 12)
THRESHOLD = 0.88
MAX_OUTPUT = 3000
MAX_MODEL_LEN = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Requests of one class.

    Attributes:
        traffic_class: what they were promised.
        input_len, output_len: tokens, uniform.
        shared_len: tokens of the prompt, of which as many as it has begin as others' do.
        num_shared: different beginnings.
        weight: relative rate.
    """

    traffic_class: TrafficClass
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    shared_len: int
    num_shared: int
    weight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A workload and its machine.

    Attributes:
        kinds: of requests.
        shape: of arrivals: poisson, gamma (in bursts; a coefficient of variation of 3), ramp (from
            half the rate to twice), waves (between 0.2 and 1.8 times the rate).
        kv_tokens, num_rows: of the machine.
        step_time: of the machine.
        machine: what it is called.
    """

    kinds: tuple[Kind, ...]
    shape: str
    kv_tokens: int
    num_rows: int
    step_time: StepTime
    machine: str

    def traffic(self, num_requests: int, rate: float, seed: int) -> list[Arrival]:
        """Arrivals by rate and seed."""
        rng, now_s, arrivals = random.Random(f"run {seed}"), 0.0, []
        for index in range(num_requests):
            at = rate
            if self.shape == "ramp":
                at *= 0.5 + 1.5 * index / num_requests
            elif self.shape == "waves":
                at *= 1 + 0.8 * math.sin(2 * math.pi * now_s * rate / 100)
            is_bursty = self.shape == "gamma"
            now_s += rng.gammavariate(1 / 9, 9 / at) if is_bursty else rng.expovariate(at)
            number = rng.choices(range(len(self.kinds)), [k.weight for k in self.kinds])[0]
            kind = self.kinds[number]
            num_input = rng.randint(*kind.input_len)
            begins = stream_of("beginning", seed, number * 1000 + rng.randrange(kind.num_shared))
            shared = min(kind.shared_len, num_input - 1)
            arrivals.append(
                Arrival(
                    request_id=f"r{index}", arrival_s=now_s, num_input=num_input,
                    num_output=rng.randint(*kind.output_len), traffic_class=kind.traffic_class,
                    segments=(Segment(begins, shared),) if shared > 0 else (),
                )
            )  # fmt: skip
        return arrivals

    def work_s(self) -> float:
        """Seconds of a request of mean length, roughly: where the search begins."""
        total = sum(kind.weight for kind in self.kinds)
        return sum(
            kind.weight / total * (sum(kind.input_len) * 0.5e-4 + sum(kind.output_len) * 2e-4)
            for kind in self.kinds
        )


def draw(number: int) -> Drawn:
    """The workload of that number; the same on every machine."""
    rng = random.Random(f"workload {number}")
    shares = rng.random() < 0.3
    count = rng.choice((1, 1, 2, 2, 3))
    kinds = []
    for index in range(count):
        input_len = _range(rng, 16, 4000, 12_000, (1, 2, 4, 16))
        output_len = _range(rng, 4, 600, MAX_OUTPUT, (1, 2, 4, 8))
        targets = _targets(rng, output_len[1])
        if index == 0 and not targets:
            targets = {"ttft_target_s": 1.0, "tpot_target_s": 0.05}
        normal = [Priority.NORMAL] * 3
        priorities = (*normal, Priority.LOW, Priority.HIGH)
        kinds.append(
            Kind(
                traffic_class=TrafficClass(
                    name=f"c{index}",
                    tenant=rng.choice(("", "", "a", "b")),
                    priority=rng.choice(priorities) if count > 1 else Priority.NORMAL,
                    **targets,
                ),
                input_len=input_len, output_len=output_len,
                shared_len=int(input_len[0] * rng.choice((0, 0.5, 0.9))) if shares else 0,
                num_shared=rng.choice((1, 4, 40)),
                weight=rng.choice((1, 1, 3)),
            )
        )  # fmt: skip
    machine = rng.choice(("published", "published", "twice as fast", "compute-bound"))
    return Drawn(
        kinds=tuple(kinds),
        shape=rng.choice(("poisson", "poisson", "gamma", "ramp", "waves")),
        kv_tokens=rng.choice((32_000, 64_000, 100_000, 200_000, 400_000)),
        num_rows=rng.choice((32, 128, 128, 256)),
        step_time=_step_time(machine),
        machine=machine,
    )


def _range(
    rng: random.Random, low: int, high: int, most: int, spreads: Sequence[int]
) -> tuple[int, int]:
    least = int(math.exp(rng.uniform(math.log(low), math.log(high))))
    return least, max(least, min(most, least * rng.choice(spreads)))


def _targets(rng: random.Random, longest: int) -> dict[str, float]:
    kind = rng.choice(("ttft", "tpot", "both", "both", "both", "e2e", "none"))
    targets = {}
    if kind in ("ttft", "both"):
        targets["ttft_target_s"] = rng.choice((0.3, 0.5, 1.0, 2.0, 5.0, 15.0))
    if kind in ("tpot", "both"):
        targets["tpot_target_s"] = rng.choice((0.025, 0.03, 0.05, 0.08, 0.15))
    if kind == "e2e":
        targets["e2e_target_s"] = rng.choice((1, 2, 4)) * (1 + longest * 0.04)
    return targets


def _step_time(machine: str) -> StepTime:
    """A measured replica; one that takes half as long; one whose tokens cost more than its weights,
    as on a CPU."""
    if machine == "published":
        return NIYAMA_STEP_TIME
    if machine == "twice as fast":
        small, large = (
            LinearCost(**{name: value / 2 for name, value in asdict(cost).items()})
            for cost in (NIYAMA_STEP_TIME.small, NIYAMA_STEP_TIME.large)
        )
        return TwoRegimeStepTime(small, large)
    cost = LinearCost(
        base=0.004, token=1.5e-4, prefill=0.0, decode=5e-5, decode_context=2e-7,
        prefill_context=1e-6,
    )  # fmt: skip
    return TwoRegimeStepTime(cost, cost)


def attainment(
    drawn: Drawn, candidate: Candidate, rate: float, seed: int, num_requests: int
) -> float:
    """Share of the requests with targets that came on time."""
    setting = Setting(
        name="drawn",
        limits=replica_limits(
            kv_tokens=drawn.kv_tokens, num_rows=drawn.num_rows, max_model_len=MAX_MODEL_LEN
        ),
        step_time=drawn.step_time, link=SwapLink(), traffic=partial(drawn.traffic, num_requests),
        rates=(rate,), max_tokens=MAX_OUTPUT, max_request_len=MAX_MODEL_LEN,
        enable_prefix_caching=any(kind.shared_len for kind in drawn.kinds),
    )  # fmt: skip
    report = run_once(setting, candidate, rate, seed)
    counted = [record for record in report.records if has_target(record)]
    return sum(record.is_on_time for record in counted) / len(counted)


def capacity(drawn: Drawn, num_requests: int) -> float:
    """Requests a second at which the best probe falls below `THRESHOLD`, within a fifth."""
    rate, low, high = 0.5 / drawn.work_s(), 0.0, math.inf
    for _ in range(8):
        best = max(attainment(drawn, probe, rate, 1, num_requests) for probe in PROBES)
        if best >= THRESHOLD:
            low = rate
        else:
            high = rate
        if low and high < 1.2 * low:
            break
        rate = math.sqrt(low * high) if low and high < math.inf else rate * (2 if low else 0.5)
    return rate


def compare(number: int, loads: Sequence[float], num_requests: int) -> dict[str, Any]:
    """One workload: by load `slo`, the best rival, and how far it is ahead."""
    drawn = draw(number)
    top = capacity(drawn, num_requests)
    cells = []
    for load in loads:
        found = {
            candidate.label: [
                attainment(drawn, candidate, top * load, seed, num_requests) for seed in SEEDS
            ]
            for candidate in (Candidate(policy="slo"), *RIVALS)
        }
        means = {label: sum(shares) / len(SEEDS) for label, shares in found.items()}
        best = max((label for label in means if label != "slo"), key=lambda label: means[label])
        cells.append({
            "load": load, "slo": means["slo"], "best_rival": best, "rival": means[best],
            "ahead": means["slo"] - means[best],
        })  # fmt: skip
    return {"number": number, "capacity": top, "drawn": drawn, "cells": cells}


def _shown(drawn: Drawn) -> str:
    classes = []
    for kind in drawn.kinds:
        goals = kind.traffic_class
        named = [
            f"{short} {value:g} s"
            for short, value in (
                ("ttft", goals.ttft_target_s), ("tpot", goals.tpot_target_s),
                ("e2e", goals.e2e_target_s),
            )
            if value is not None
        ]  # fmt: skip
        words = [
            f"{kind.weight} × {kind.input_len[0]}-{kind.input_len[1]}",
            f"+ {kind.output_len[0]}-{kind.output_len[1]}",
            " ".join(named) or "no target",
        ]
        if kind.shared_len:
            words.append(f"shares {kind.shared_len} of {kind.num_shared}")
        if goals.priority is not Priority.NORMAL:
            words.append(goals.priority.name.lower())
        if goals.tenant:
            words.append(f"tenant {goals.tenant}")
        classes.append(" ".join(words))
    machine = f"{drawn.machine}, {drawn.num_rows} rows, {drawn.kv_tokens} KV, {drawn.shape}"
    return f"{machine}: {' | '.join(classes)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison; 1 if `slo` is behind anywhere."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drawn_workloads", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("numbers", help="of workloads: N, or FIRST:END")
    parser.add_argument("--loads", default="1,1.6", help="in capacities (%(default)s)")
    parser.add_argument("--num-requests", type=int, default=300, help="of a run (%(default)s)")
    parser.add_argument("--margin", type=float, default=0.02, help="that is no loss (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--json", help="file for the figures")
    args = parser.parse_args(argv)
    first, _, end = args.numbers.partition(":")
    numbers = range(int(first), int(end or int(first) + 1))
    loads = tuple(float(part) for part in args.loads.split(","))
    found, behind = [], 0
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        work = partial(compare, loads=loads, num_requests=args.num_requests)
        for one in pool.map(work, numbers):
            print(f"{one['number']:4d}  {_shown(one['drawn'])}")
            for cell in one["cells"]:
                is_behind = cell["ahead"] < -args.margin
                behind += is_behind
                print(
                    f"      {'behind' if is_behind else '      '} at {cell['load']:g} of "
                    f"{one['capacity']:.3g}/s: slo {cell['slo']:.3f}, {cell['best_rival']} "
                    f"{cell['rival']:.3f}: {cell['ahead']:+.3f}",
                    flush=True,
                )
            found.append({**one, "drawn": _shown(one["drawn"])})
    gains = [cell["ahead"] for one in found for cell in one["cells"]]
    print(
        f"{len(gains)} cells of {len(found)} workloads: slo is {sum(gains) / len(gains):+.3f} of "
        f"the best rival in the mean, behind by more than {args.margin:g} in {behind}"
    )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
