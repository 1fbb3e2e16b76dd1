"""`octavo simulate --replicas N`: arguments of a fleet, and its run."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.server.cli.simulation_args import (
    run_setting_from,
    workload_from,
)

MOST_REPLICAS = 100_000


def add_fleet_args(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that make a fleet of a replica."""
    group = parser.add_argument_group("fleet", "of several replicas behind routers")
    group.add_argument(
        "--replicas", type=int, metavar="N",
        help="simulate so many; --rate is that of all together (default: one, with no router)",
    )  # fmt: skip
    group.add_argument(
        "--router", default="forecast", metavar="NAME[:KEY=VALUE,…]",
        help="round_robin, least_work, power_of_two, prefix_affinity, session_affinity or "
        "forecast (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--fronts", type=int, default=1, metavar="K",
        help="routers that share nothing (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--report-age", type=float, default=0.1, metavar="S",
        help="time between two reports of a replica (default: %(default)g s)",
    )  # fmt: skip
    group.add_argument(
        "--report-delay", type=float, default=0.01, metavar="S",
        help="until a report reaches its routers (default: %(default)g s)",
    )  # fmt: skip
    group.add_argument(
        "--report-loss", type=float, default=0.0, metavar="SHARE",
        help="of the reports that do not reach a router (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--tries", type=int, default=2, metavar="N",
        help="replicas that a request is sent to before it is refused (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--machine", action="append", default=[], dest="machines", metavar="SPEC",
        help="NAME:share=1,speed=0.5,kv_tokens=32000: a kind of replica; may be repeated",
    )  # fmt: skip
    group.add_argument(
        "--disasters", default="", metavar="NAME=VALUE,…",
        help="deaths, hangs, slows and partitions for a replica and an hour, and how long each "
        "lasts (docs/fleets.md lists the names)",
    )  # fmt: skip
    group.add_argument(
        "--autoscale", metavar="SIGNAL[:KEY=VALUE,…]",
        help="saturation, refusals or attainment, with least, most, high, low, every_s, start_s",
    )  # fmt: skip
    group.add_argument(
        "--processes", type=int, default=0, metavar="N",
        help="that play replicas; the outcome does not depend on it (default: this one alone)",
    )  # fmt: skip


def run_fleet(args: argparse.Namespace) -> int:
    """Simulates a fleet and prints how its requests fared.

    Raises:
        InvalidConfigError: arguments that are out of range or do not go together.
    """

    from octavo.engine.routing.autoscaler import Autoscaling
    from octavo.engine.simulation.faults import Faults
    from octavo.engine.simulation.fleet.disasters import Disasters
    from octavo.engine.simulation.fleet.fleet import FleetOptions, simulate_fleet
    from octavo.engine.simulation.fleet.machines import Machine, parse_machines
    from octavo.engine.simulation.fleet.replica import ReplicaOptions

    for name in ("record", "users", "replay", "check_refusals"):
        if getattr(args, name) is not None:
            raise InvalidConfigError(name, getattr(args, name), "left out with --replicas")
    if args.known_lengths:
        raise InvalidConfigError("known_lengths", True, "left out with --replicas")
    if not 1 <= args.replicas <= MOST_REPLICAS:
        raise InvalidConfigError("replicas", args.replicas, f"1 to {MOST_REPLICAS}")
    setting, overhead = run_setting_from(args)
    limits = setting.limits
    options = FleetOptions(
        num_replicas=args.replicas,
        router=args.router,
        num_fronts=args.fronts,
        report_age_s=args.report_age,
        report_delay_s=args.report_delay,
        report_loss=args.report_loss,
        num_tries=args.tries,
        disasters=Disasters.parse(args.disasters),
        autoscaling=None if args.autoscale is None else Autoscaling.parse(args.autoscale),
        seed=args.seed,
        num_processes=args.processes,
        replica=ReplicaOptions(
            scheduler_args={
                "policy": args.policy,
                "enable_prefix_caching": setting.enable_prefix_caching,
                "num_decode_steps": limits.max_num_steps,
            },
            overlap=not args.no_overlap,
            host=overhead,
            link=setting.link,
            faults=Faults.parse(args.faults),
            max_tokens=setting.max_tokens,
        ),
    )
    machines = parse_machines(
        args.machines, Machine(limits=limits, step_time=setting.step_time, name="replica")
    )
    arrivals = workload_from(args, setting)
    assert isinstance(arrivals, list)
    begun_s = time.perf_counter()
    report = simulate_fleet(arrivals, machines, options)
    wall_s = time.perf_counter() - begun_s
    if args.requests:
        with open(args.requests, "w", encoding="utf-8") as file:
            for record, places in zip(report.records, report.places, strict=True):
                file.write(json.dumps({**record.to_dict(), "replicas": places}) + "\n")
    summary: dict[str, Any] = {
        "policy": args.policy, "router": args.router, "replicas": args.replicas, "seed": args.seed,
        **report.summary(),
    }  # fmt: skip
    if args.json:
        print(json.dumps(summary))
        return 0
    from octavo.server.cli.simulate import print_summary

    print_summary(summary)
    print(
        f"{'simulated in':24} {wall_s:.2f} s, {report.num_turns / max(wall_s, 1e-9):,.0f} turns/s"
    )
    return 0
