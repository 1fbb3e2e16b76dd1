"""`octavo plan --slo SHARE`: how many of which machine serve a workload on time.

Each answer is a search over simulated fleets of one kind of device: the scheduler, its policy and
the router are the real ones, step times are what bytes and FLOPs take at least on the device.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.server.cli.workload_args import add_workload_args

DEFAULT_DEVICES = ("h200",)
MOST_REPLICAS = 1024


def add_fleet_plan_args(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a fleet's plan."""
    group = parser.add_argument_group("fleet", "how many replicas a workload needs")
    group.add_argument(
        "--slo", type=float, metavar="SHARE",
        help="of the requests that must be on time, such as 0.99, by their targets of --ttft, "
        "--tpot or --class; asks for a plan of a fleet",
    )  # fmt: skip
    group.add_argument(
        "--device", action="append", default=[], dest="devices", metavar="NAME[:N]",
        help="h100, h200, v5e, v5p, v6e or tpu7x, N of them a replica; may be repeated to compare "
        f"(default: {DEFAULT_DEVICES[0]})",
    )  # fmt: skip
    group.add_argument(
        "--rate", type=float, metavar="R",
        help="requests a second of all replicas together (default: the trace's own, or 1)",
    )  # fmt: skip
    group.add_argument("--num-requests", type=int, metavar="N", help="in all")
    group.add_argument(
        "--most-replicas", type=int, default=MOST_REPLICAS, metavar="N",
        help="to try (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--seeds", type=int, default=1, metavar="N",
        help="workloads drawn, each of which must be served so (default: %(default)s)",
    )  # fmt: skip
    add_workload_args(group)


def run_fleet_plan(args: argparse.Namespace) -> int:
    """Prints how many of each device it takes; 0, also if no number is enough.

    Raises:
        InvalidConfigError: arguments that are out of range or do not go together.
    """
    if not 0 < args.slo <= 1:
        raise InvalidConfigError("slo", args.slo, "a share above 0 and at most 1, such as 0.99")
    if not 1 <= args.most_replicas <= MOST_REPLICAS:
        raise InvalidConfigError("most_replicas", args.most_replicas, f"1 to {MOST_REPLICAS}")
    if not 1 <= args.seeds <= 100:
        raise InvalidConfigError("seeds", args.seeds, "1 to 100")
    found = [_of_device(args, device) for device in args.devices or DEFAULT_DEVICES]
    if args.json:
        print(json.dumps({"slo": args.slo, "devices": found}))
        return 0
    _print(args, found)
    return 0


def _of_device(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """The plan of one kind, as JSON has it."""
    from octavo.engine.simulation.fleet.fleet import FleetOptions, simulate_fleet
    from octavo.engine.simulation.fleet.machines import Machine
    from octavo.engine.simulation.fleet.replica import ReplicaOptions
    from octavo.engine.simulation.fleet.sizing import fewest_replicas
    from octavo.engine.simulation.roofline import DEVICES

    name, _, number = device.partition(":")
    if name.lower() not in DEVICES or not (number or "1").isdecimal() or number == "0":
        allowed = f"{', '.join(DEVICES)}, and how many of them share a replica, as h200:2"
        raise InvalidConfigError("device", device, allowed)
    plan: dict[str, Any] = {"device": device, "devices_per_replica": int(number or 1)}
    setting = _setting(args, device)
    if setting is None:
        return plan | {"fits": False, "replicas": None, "attained": {}}
    limits = setting.limits
    machine = Machine(limits=limits, step_time=setting.step_time, name=device)
    replica = ReplicaOptions(
        scheduler_args={
            "policy": "slo",
            "enable_prefix_caching": True,
            "num_decode_steps": limits.max_num_steps,
        },
        link=setting.link,
        max_tokens=setting.max_tokens,
    )
    rate = args.rate or setting.rates[0]
    workloads = [setting.traffic(rate, seed) for seed in range(1, args.seeds + 1)]
    if not any(_has_target(arrival) for arrivals in workloads for arrival in arrivals):
        raise InvalidConfigError("slo", args.slo, "given with targets: --ttft, --tpot or --class")

    def attain(num_replicas: int) -> float:
        options = FleetOptions(
            num_replicas=num_replicas, replica=replica, stops_below=args.slo,
            stops_when_all_late=True,
        )  # fmt: skip
        share = 1.0
        for arrivals in workloads:
            share = min(share, simulate_fleet(arrivals, [(machine, 1.0)], options).attainment)
            if share < args.slo:
                break
        told = "too few" if share < args.slo else f"{share:.1%} on time"
        print(f"octavo: {device}, {num_replicas} replicas: {told}", file=sys.stderr, flush=True)
        return share

    sizing = fewest_replicas(attain, args.slo, args.most_replicas)
    # Of runs that ended early nothing is known but that it is less.
    attained = {
        str(num): round(share, 6) if share >= args.slo else None
        for num, share in sorted(sizing.attained.items())
    }
    kv_tokens = (limits.num_pages - 1) // len(limits.windows) * limits.page_size
    return plan | {
        "fits": True,
        "kv_tokens": kv_tokens,
        "rate": rate,
        "replicas": sizing.num_replicas,
        "attained": attained,
    }


def _setting(args: argparse.Namespace, device: str) -> Any:
    """What `octavo simulate --step-time DEVICE` simulates; None if the weights alone do not fit."""
    from octavo.engine.simulation.roofline import kv_capacity, roofline
    from octavo.server.cli.plan import read_model_config
    from octavo.server.cli.simulation_args import add_setting_args, setting_from

    name, _, number = device.partition(":")
    try:
        model = roofline(name, read_model_config(args.model), num_devices=int(number or 1))
    except InvalidConfigError as error:
        if error.field == "num_devices":  # too few of them for the weights
            return None
        raise
    if kv_capacity(model) < 1:
        return None
    parser = argparse.ArgumentParser()
    add_setting_args(parser)
    asked = parser.parse_args([])
    for name in vars(asked).keys() & vars(args).keys():
        setattr(asked, name, getattr(args, name))
    asked.step_time, asked.enable_prefix_caching = device, True
    asked.page_size = asked.max_model_len = None
    setting, _ = setting_from(asked)
    return setting


def _has_target(arrival: Any) -> bool:
    kind = arrival.traffic_class
    targets = (kind.ttft_target_s, kind.tpot_target_s, kind.e2e_target_s)
    return any(target is not None for target in targets)


def _print(args: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """The plan as people read it."""
    print(f"{args.slo:.1%} of the requests on time, by simulation:")
    for plan in found:
        name = plan["device"]
        if not plan["fits"]:
            print(f"  {name:<10} the weights alone do not fit")
            continue
        tried = ", ".join(
            f"{num}: {'less' if share is None else f'{share:.1%}'}"
            for num, share in plan["attained"].items()
        )
        if plan["replicas"] is None:
            print(f"  {name:<10} not with {args.most_replicas} replicas ({tried})")
            continue
        num_devices = plan["replicas"] * plan["devices_per_replica"]
        print(f"  {name:<10} {plan['replicas']} replicas, {num_devices} devices ({tried})")
