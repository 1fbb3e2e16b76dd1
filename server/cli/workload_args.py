"""One grammar of workloads for every command that plays or sends them.

`--workload NAME:key=value,…` draws one (repeated: several side by side), `--trace FILE` reads one.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from octavo.engine.errors import InvalidConfigError
from octavo.engine.request import Priority
from octavo.engine.simulation.workloads.arrivals import parse_process, spread_classes
from octavo.engine.simulation.workloads.generators import GENERATORS
from octavo.engine.simulation.workloads.spec import (
    MIX,
    Extent,
    Workload,
    generated_workload,
    trace_file_workload,
)
from octavo.engine.simulation.workloads.traces import FORMATS
from octavo.engine.simulation.workloads.traffic import (
    Arrival,
    TrafficClass,
    checked_target,
    with_targets,
)


def add_workload_args(group: Any) -> None:
    """Adds the options that say what is served; rate and number are the command's own.

    Args:
        group: a parser or a group of one.
    """
    group.add_argument(
        "--workload", action="append", default=[], dest="workloads", metavar="NAME[:KEY=VALUE,…]",
        help=f"a generated workload: {', '.join((*GENERATORS, MIX))}; may be repeated, with "
        "share=N in each, for several side by side (docs/simulation.md lists the parameters)",
    )  # fmt: skip
    group.add_argument(
        "--trace", metavar="FILE",
        help="CSV or JSON lines of Azure, Mooncake, ServeGen or BurstGPT, or a table of lengths",
    )  # fmt: skip
    group.add_argument(
        "--trace-format", metavar="NAME",
        help=f"{', '.join(known.name for known in FORMATS)} (default: as its columns say)",
    )  # fmt: skip
    group.add_argument("--window", metavar="BEGIN:END", help="seconds of the trace to take")
    group.add_argument(
        "--arrivals", metavar="PROCESS",
        help="poisson, gamma:cv=NUMBER or recorded, as a trace has them (default: recorded, or the "
        "generator's own)",
    )  # fmt: skip
    group.add_argument(
        "--duration", type=float, metavar="S",
        help="seconds for which requests arrive (default: 300, a whole trace, or until "
        "--num-requests have)",
    )  # fmt: skip
    group.add_argument(
        "--class", action="append", default=[], dest="classes", metavar="SPEC",
        help="name:share=0.2,ttft=1,tpot=0.05,e2e=60,priority=low,tenant=a; may be repeated, "
        "the rest is of the first class (seconds)",
    )  # fmt: skip
    group.add_argument(
        "--ttft", type=float, metavar="S", help="target of every interactive request, seconds"
    )
    group.add_argument("--tpot", type=float, metavar="S", help="target a token, likewise")


def asked_workload(args: argparse.Namespace, num_requests: int | None) -> Workload | None:
    """The workload that `--workload` or `--trace` asks for; None if neither does.

    Raises:
        InvalidConfigError: options that are out of range or do not go together.
    """
    extent = Extent(num_requests=num_requests, duration_s=args.duration)
    if args.workloads:
        for name in ("trace", "trace_format", "window", "classes"):
            if getattr(args, name):
                option = {"classes": "class"}.get(name, name)
                raise InvalidConfigError(option, getattr(args, name), "left out with --workload")
        process = None if args.arrivals is None else parse_process(args.arrivals)
        if args.arrivals is not None and process is None:
            raise InvalidConfigError(
                "arrivals", args.arrivals, "poisson or gamma: nothing is recorded"
            )
        return promised(args, generated_workload(args.workloads, extent, process=process))
    if args.trace is None:
        for name in ("trace_format", "window"):
            if getattr(args, name) is not None:
                raise InvalidConfigError(name, getattr(args, name), "left out without --trace")
        return None
    workload = trace_file_workload(
        args.trace,
        extent,
        format_name=args.trace_format,
        arrivals=args.arrivals,
        between_s=_window(args.window),
    )
    return promised(args, workload)


def promised(args: argparse.Namespace, workload: Workload) -> Workload:
    """The workload with the classes of `--class` and the targets of `--ttft` and `--tpot`."""
    classes = [parse_class(spec) for spec in args.classes]
    checked_target("ttft", args.ttft)
    checked_target("tpot", args.tpot)

    def change(arrivals: list[Arrival], seed: int) -> list[Arrival]:
        return with_targets(in_classes(arrivals, classes, seed), args.ttft, args.tpot)

    return workload.changed(change)


def in_classes(
    arrivals: list[Arrival], classes: list[tuple[TrafficClass, float]], seed: int
) -> list[Arrival]:
    """The arrivals in classes by their shares; tenants stay where a class names none."""
    if not classes:
        return arrivals
    tenants = {a.request_id: a.traffic_class.tenant for a in arrivals}
    first_class = classes[0][0]
    arrivals = [dataclasses.replace(a, traffic_class=first_class) for a in arrivals]
    left = 1.0
    for index, (traffic_class, share) in enumerate(classes[1:], 1):
        # Shares are of all; each class draws from the first one's requests alone.
        first = [a for a in arrivals if a.traffic_class is first_class]
        rest = [a for a in arrivals if a.traffic_class is not first_class]
        moved = spread_classes(first, min(1.0, share / left), traffic_class, seed * 100 + index)
        arrivals = sorted([*moved, *rest], key=lambda a: (a.arrival_s, a.request_id))
        left = max(1e-9, left - share)
    return [_of_tenant(arrival, tenants[arrival.request_id]) for arrival in arrivals]


def _of_tenant(arrival: Arrival, tenant: str) -> Arrival:
    if not tenant or arrival.traffic_class.tenant:
        return arrival
    named = dataclasses.replace(arrival.traffic_class, tenant=tenant)
    return dataclasses.replace(arrival, traffic_class=named)


def parse_class(spec: str) -> tuple[TrafficClass, float]:
    """Reads `"chat:share=0.8,ttft=1,tpot=0.05"`: a class and its share of the traffic.

    Raises:
        InvalidConfigError: an unknown name or a bad value.
    """
    name, _, rest = spec.partition(":")
    fields = {"ttft": "ttft_target_s", "tpot": "tpot_target_s", "e2e": "e2e_target_s"}
    values: dict[str, Any] = {"name": name}
    share = 1.0
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key == "priority":
            values["priority"] = Priority.parse(value)
        elif key == "tenant":
            values["tenant"] = value
        elif key == "share":
            share = _positive(spec, key, value)
        elif key in fields:
            values[fields[key]] = checked_target(key, _positive(spec, key, value))
        else:
            raise InvalidConfigError("class", spec, "share, ttft, tpot, e2e, priority or tenant")
    return TrafficClass(**values), share


def _positive(spec: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise InvalidConfigError("class", spec, f"NAME:{key}=NUMBER with a finite number above 0")
    return number


def _window(text: str | None) -> tuple[float, float]:
    begin, _, end = (text or "").partition(":")
    try:
        return float(begin or 0), float(end or "inf")
    except ValueError:
        raise InvalidConfigError("window", text, "BEGIN:END in seconds") from None
