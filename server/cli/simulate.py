"""`octavo simulate`: plays traffic through the real scheduler under a virtual clock.

Without `--replay`, simulates a replica and prints how its requests fared. With it, feeds a
recorded event log to the scheduler and checks that every decision is the same. With
`--check-refusals`, puts each refused request into a log alone: its refusal was wrong if it would
have been on time and made nobody else late. With `--replicas`, simulates a fleet behind routers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from dataclasses import asdict
from typing import Any

from octavo.server.cli.dependent_args import check_left_out
from octavo.server.cli.fleet_args import add_fleet_args, run_fleet
from octavo.server.cli.pictures import Pictures, add_picture_args
from octavo.server.cli.simulation_args import (
    add_setting_args,
    quiet_faults,
    run_setting_from,
    workload_from,
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "simulate", help="play traffic under a virtual clock", description=__doc__
    )
    parser.add_argument("--policy", default="fcfs", help="NAME or NAME:key=value,…")
    parser.add_argument("--token-budget", type=int, metavar="N", help="tokens in a step")
    parser.add_argument(
        "--enable-prefix-caching", "--prefix-caching", action=argparse.BooleanOptionalAction,
        default=False, help="share and keep full pages (default: off)",
    )  # fmt: skip
    parser.add_argument(
        "--max-model-len", type=int, metavar="N",
        help="most tokens of a request (default 16384, or the workload's longest)",
    )  # fmt: skip
    parser.add_argument(
        "--known-lengths", action="store_true", help="clients declare true output lengths"
    )
    parser.add_argument("--faults", default="", metavar="NAME=SHARE,…", help="what goes wrong")
    parser.add_argument("--seed", type=int, default=1, help="of workload and faults (default 1)")
    parser.add_argument("--record", metavar="FILE", help="write the event log")
    parser.add_argument("--requests", metavar="FILE", help="write each request's fate, JSON lines")
    add_picture_args(parser)
    parser.add_argument("--replay", metavar="LOG", help="replay a recorded event log instead")
    parser.add_argument(
        "--check-refusals",
        metavar="LOG",
        help="count the refusals of a recorded log that were wrong, instead",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_setting_args(parser)
    add_fleet_args(parser)


def run(args: argparse.Namespace) -> int:
    """Simulates or replays; 1 if a replay decided otherwise."""
    if args.replicas is not None:
        return run_fleet(args)
    check_left_out(args, add_fleet_args, "--replicas")
    if args.replay is not None:
        return _replay(args)
    if args.check_refusals is not None:
        return _check_refusals(args)

    from octavo.engine.scheduler.scheduler import Scheduler
    from octavo.engine.simulation.faults import Faults
    from octavo.engine.simulation.simulate import SimulationOptions, simulate, true_length

    setting, overhead = run_setting_from(args)
    limits = setting.limits
    scheduler_args: dict[str, Any] = {
        "policy": args.policy,
        "enable_prefix_caching": setting.enable_prefix_caching,
        "num_decode_steps": limits.max_num_steps,
    }
    pictures = Pictures(args)
    options: dict[str, Any] = {"declared_length": true_length} if args.known_lengths else {}
    with contextlib.ExitStack() as stack:
        if args.record:
            options["log"] = stack.enter_context(open(args.record, "w", encoding="utf-8"))
        begun_s = time.perf_counter()
        report = simulate(
            workload_from(args, setting),
            Scheduler(limits, explain=pictures.observer is not None, **scheduler_args),
            setting.step_time,
            SimulationOptions(
                overlap=not args.no_overlap,
                host=overhead,
                link=setting.link,
                faults=Faults.parse(args.faults),
                seed=args.seed,
                max_tokens=setting.max_tokens,
                observer=pictures.observer,
                scheduler_args=scheduler_args,
                **options,
            ),
        )
        wall_s = time.perf_counter() - begun_s
    if args.requests:
        with open(args.requests, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(record.to_dict()) + "\n" for record in report.records)
    pictures.draw()
    summary = {"policy": args.policy, "seed": args.seed, **report.summary()}
    if args.json:
        print(json.dumps(summary))
    else:
        print_summary(summary)
        speed = report.num_output_tokens / max(wall_s, 1e-9)
        print(f"{'simulated in':24} {wall_s:.2f} s, {speed:,.0f} output tokens a second")
    return 0


def print_summary(summary: dict[str, Any]) -> None:
    """A run as people read it: times in milliseconds."""
    classes = summary.pop("classes")
    for name, value in summary.items():
        print(f"{name:24} {_show(name, value)}")
    if len(classes) > 1 or "" not in classes:
        print(
            f"{'class':12} {'requests':>8} {'on time':>8} {'TTFT p50/p99':>16} {'TPOT p50/p99':>16}"
        )
        for name, figures in classes.items():
            print(
                f"{name:12} {figures['num_requests']:8} {figures['attainment']:8.3f} "
                f"{_pair(figures['ttft_s']):>16} {_pair(figures['tpot_s']):>16}"
            )


def _pair(values: dict[str, float] | None) -> str:
    return "-" if values is None else f"{1e3 * values['p50']:.0f} / {1e3 * values['p99']:.0f}"


def _show(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {1e3 * item:.1f}" for key, item in value.items()) + " ms"
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _check_refusals(args: argparse.Namespace) -> int:
    from octavo.engine.simulation.refusal_check import check_refusals

    quiet_faults()
    figures = check_refusals(args.check_refusals).to_dict()
    if args.json:
        print(json.dumps(figures))
    else:
        low, high = figures["interval"]
        print(
            f"{figures['wrong']} of {figures['refused']} refusals were wrong "
            f"({figures['wrong_share']:.1%}, 95% interval {low:.1%} to {high:.1%}), "
            f"{figures['late']} of {figures['requests']} requests with a target were served late"
        )
    return 0


def _replay(args: argparse.Namespace) -> int:
    from octavo.engine.simulation.replay import read_log, replay

    pictures = Pictures(args)
    if pictures.observer is not None:
        pictures.read(read_log(args.replay)[1])
        pictures.draw()
    result = replay(args.replay)
    if args.json:
        print(json.dumps(asdict(result)))
    elif result.difference is None:
        print(
            f"same decisions: {result.num_plans} plans, {result.num_tokens} output tokens, "
            f"{result.num_events} events"
        )
    else:
        print(f"another decision after {result.num_plans} plans: {result.difference}")
    return 0 if result.difference is None else 1
