"""`octavo profile`: measures this machine with a model, for simulations of it.

Runs small workloads through the real engine and writes what each compiled program and the host
took. `octavo simulate --step-time FILE` plays traffic on the machine so described.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import sys

from octavo.engine.errors import InvalidConfigError
from octavo.server.cli.engine_args import add_engine_args, checked_engine_args


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser("profile", help="measure this machine", description=__doc__)
    parser.add_argument("--output", "-o", default="profile.json", help="(default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="of each workload (default 1)")
    parser.add_argument(
        "--longest-context",
        type=int,
        default=1024,
        help="tokens of the longest sequences: about those of the traffic to be simulated "
        "(default 1024)",
    )
    add_engine_args(parser, leave_out=("seed",))


def run(args: argparse.Namespace) -> int:
    """Measures and writes the file."""
    from dataclasses import replace

    from tqdm import tqdm

    from octavo.engine.engine import Engine
    from octavo.engine.engine_arguments import engine_config
    from octavo.engine.measuring.profiling import SHORTEST_CONTEXT, profile_engine

    for name, least in (("repeats", 1), ("longest_context", SHORTEST_CONTEXT)):
        if getattr(args, name) < least:
            raise InvalidConfigError(name, getattr(args, name), f"an integer of at least {least}")

    is_terminal = sys.stderr.isatty()
    engine = Engine(engine_config(None, checked_engine_args(args)), progress=is_terminal)
    with tqdm(total=100, desc="Profiling", disable=not is_terminal) as bar:
        profile = profile_engine(
            engine,
            repeats=args.repeats,
            longest_context=args.longest_context,
            on_progress=lambda share: bar.update(round(100 * share) - bar.n),
        )
    about = {
        "model": engine.model_name,
        "dtype": engine.dtype,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "octavo " + shlex.join(sys.argv[1:]),
    }
    replace(profile, about=about).save(args.output)
    for program in profile.programs:
        kind = "mixed" if program.num_new_rows else "decode"
        size = program.num_tokens if program.num_new_rows else program.num_rows
        base_s = program.base_s + program.iteration_s
        print(f"{kind:6} {size:5}  {1e3 * base_s:8.2f} ms  ± {100 * program.noise:.0f}%")
    host_s = profile.host.plan_s + profile.host.commit_s
    if profile.link is not None:
        link = profile.link
        print(
            f"page copies {link.bytes_per_s / 1e9:.2f} GB/s one way, "
            f"{1e6 * link.latency_s:.0f} µs before the first"
        )
    print(f"host {1e6 * host_s:.0f} µs a step; written to {args.output}")
    return 0
