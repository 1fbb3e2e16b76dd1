"""How fast fleets are simulated: seconds of processors and of the wall for a simulated minute.

    python -m benchmarks.fleet_speed --replicas 32,128 --seconds 10
    python -m benchmarks.fleet_speed --replicas 1000 --seconds 60 --processes 2

A line a fleet, and what 1,000 replicas for 60 s would take by it: turns of the loop are in
proportion to replicas and time, and so is all that a turn costs. Processor time holds where a
machine has other work, as far as caches are not shared.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

from benchmarks.machine import about_machine
from benchmarks.router_matrix import CASES
from octavo.engine.simulation.fleet.fleet import FleetOptions, simulate_fleet
from octavo.engine.simulation.fleet.machines import Machine
from octavo.engine.simulation.fleet.replica import ReplicaOptions
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME
from octavo.engine.simulation.workloads.spec import Extent, generated_workload

GOAL_REPLICAS, GOAL_S = 1000, 60.0


def measure(
    case_name: str, num_replicas: int, seconds: float, router: str, num_processes: int
) -> dict[str, Any]:
    """Plays a fleet at a load of 1 and times it, its processes' start included."""
    case = next(case for case in CASES if case.name == case_name)
    workload = generated_workload([case.source], Extent(duration_s=seconds))
    arrivals = workload.traffic(num_replicas * case.capacity, 1)
    limits = replica_limits(kv_tokens=case.kv_tokens, max_model_len=case.max_model_len)
    options = FleetOptions(
        num_replicas=num_replicas,
        router=router,
        num_processes=num_processes,
        stops_when_all_late=True,
        replica=ReplicaOptions(
            scheduler_args={"policy": "auto", "enable_prefix_caching": True},
            max_tokens=max(2048, workload.max_output),
        ),
    )
    begun_s, cpu_s = time.perf_counter(), _cpu_s()
    report = simulate_fleet(
        arrivals, [(Machine(limits=limits, step_time=NIYAMA_STEP_TIME), 1.0)], options
    )
    wall_s, cpu_s = time.perf_counter() - begun_s, _cpu_s() - cpu_s
    share = GOAL_REPLICAS * GOAL_S / (num_replicas * report.duration_s)
    return {
        "workload": case_name,
        "router": router,
        "replicas": num_replicas,
        "processes": num_processes,
        "simulated_s": report.duration_s,
        "requests": len(arrivals),
        "turns": report.num_turns,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "turns_per_cpu_s": report.num_turns / cpu_s,
        "goal_cpu_s": cpu_s * share,
        "digest": report.digest(),
    }


def _cpu_s() -> float:
    """Seconds of processors that this process and those that it ended took."""
    found = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        found += usage.ru_utime + usage.ru_stime
    return found


def main() -> None:
    """Prints a line for each fleet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", default="32,128", help="by commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="for which requests arrive")
    parser.add_argument("--workload", default="multi-turn", choices=[c.name for c in CASES])
    parser.add_argument("--router", default="forecast")
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = [
        measure(args.workload, int(num), args.seconds, args.router, args.processes)
        for num in args.replicas.split(",")
    ]
    if args.json:
        print(json.dumps({**about_machine(), "fleets": found}))
        return
    for each in found:
        print(
            f"{each['replicas']:5} replicas, {each['simulated_s']:.1f} s: {each['turns']:,} turns, "
            f"{each['turns_per_cpu_s']:,.0f} a second of a processor, {each['wall_s']:.0f} s; "
            f"{GOAL_REPLICAS} replicas for {GOAL_S:g} s: {each['goal_cpu_s'] / 60:.1f} minutes of "
            "one processor"
        )


if __name__ == "__main__":
    main()
