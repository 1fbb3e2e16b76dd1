"""Finds rivals' tunings, and evaluates them against `slo` over workloads, loads and seeds.

    python -m benchmarks.goodput_matrix tune --trace-dir TRACES
    python -m benchmarks.goodput_matrix evaluate --trace-dir TRACES --only agents --loads 1,1.5

`tune` writes tunings to the results' folder and commits nothing; `evaluate` reads those that are
committed beside this module, and ends with status 1 where a cell falls short. Both keep their runs
and go on where they were broken off.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.goodput_matrix.runs import BOUND, ROOT, OutOfTimeError, RunStore
from benchmarks.goodput_matrix.tuning import LOADS, RIVALS, TUNING_SEEDS, Variant, tune_case
from benchmarks.goodput_matrix.verdict import (
    OURS,
    judge_all,
    judge_cell,
    mean_by_load,
    mean_gain,
    table,
)
from benchmarks.goodput_matrix.workloads import CASES, Case, get_case
from benchmarks.machine import about_machine
from octavo.engine.errors import InvalidConfigError

TUNINGS = Path(__file__).with_name("tunings.json")
OUTPUT = ROOT / "benchmarks" / "results" / "goodput-matrix"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; its status."""
    args = _parser().parse_args(argv)
    try:
        return _tune(args) if args.command == "tune" else _evaluate(args)
    except InvalidConfigError as error:
        print(f"goodput_matrix: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.goodput_matrix", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    for name, minutes in (("tune", 60.0), ("evaluate", 40.0)):
        command = commands.add_parser(name)
        command.add_argument("--trace-dir", help="folder of the Azure traces")
        command.add_argument("--only", action="append", metavar="WORKLOAD", help="(default: all)")
        command.add_argument("--loads", type=_numbers, default=LOADS, help="in capacities")
        command.add_argument("--policies", help="rivals, by commas (default: all)")
        command.add_argument("--workers", type=int, default=2, help="processes; 0: this one")
        command.add_argument(
            "--minutes", type=float, default=minutes, help="then no run is begun (%(default)g)"
        )
        command.add_argument("--num-requests", type=int, help="of a run, in place of the case's")
        command.add_argument("--output", type=Path, default=OUTPUT, help="folder (%(default)s)")
        if name == "evaluate":
            command.add_argument("--seeds", type=int, default=3, help="number of them")
            command.add_argument("--tunings", type=Path, default=TUNINGS)
            command.add_argument("--no-plots", action="store_true")
    return parser


def _tune(args: argparse.Namespace) -> int:
    path = args.output / "tunings.json"
    tunings = json.loads(path.read_text()) if path.exists() else {"workloads": {}}
    begun_s, is_done = time.monotonic(), False
    store = _store(args)
    try:
        for case in _cases(args):
            _say(f"{case.name}: capacity and tunings")
            tuned = tune_case(case, store, loads=args.loads, policies=_policies(args))
            tunings["workloads"][case.name] = {**tuned, "seeds": TUNING_SEEDS, **_about(args)}
            _say(f"{case.name}: capacity {tuned['capacity']:.3g} a second")
            args.output.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(tunings, indent=1) + "\n")
        is_done = True
    except OutOfTimeError:
        _say(f"{args.minutes:g} minutes are over: run it again to go on")
    finally:
        store.close()
    _say_runs(store, begun_s)
    return 0 if is_done else 1


def _evaluate(args: argparse.Namespace) -> int:
    if not args.tunings.exists():
        raise InvalidConfigError("tunings", str(args.tunings), "a file that `tune` wrote")
    tunings = json.loads(args.tunings.read_text())["workloads"]
    cases = [case for case in _cases(args) if args.only or case.name in tunings]
    for case in cases:
        for load in args.loads:
            if f"{load:g}" not in tunings.get(case.name, {"loads": {}})["loads"]:
                known = ", ".join(
                    f"{name} at {', '.join(tuned['loads'])}" for name, tuned in tunings.items()
                )
                raise InvalidConfigError("loads", f"{case.name} at {load:g}", known)
    begun_s = time.monotonic()
    unfinished = [f"{case.name}: not tuned" for case in _cases(args) if case not in cases]
    cells: list[dict[str, Any]] = []
    bounds: dict[tuple[str, float], float] = {}
    store = _store(args)
    try:
        for case, load in _pairs(cases, args.loads):
            try:
                cell, bound = _cell(case, load, tunings[case.name], store, args)
            except OutOfTimeError:
                unfinished.append(f"{case.name} at {load:g}: the time was over")
                continue
            cells.append(cell)
            bounds[case.name, load] = bound
            _say(f"{case.name} at {load:g}: {cell['ahead']['mean']:+.3f} of {cell['best_rival']}")
    finally:
        store.close()
    shortfalls = [*judge_all(cells), *unfinished]
    _write(args, cells, bounds, tunings, shortfalls)
    _say_runs(store, begun_s)
    return 1 if shortfalls else 0


def _pairs(cases: Sequence[Case], loads: Sequence[float]) -> Iterator[tuple[Case, float]]:
    for case in cases:
        for load in loads:
            yield case, load


def _cell(
    case: Case, load: float, tuned: dict[str, Any], store: RunStore, args: argparse.Namespace
) -> tuple[dict[str, Any], float]:
    """The cell's verdict and bound: every policy serves the same requests, seed by seed."""
    variants = {OURS: Variant(OURS)}
    for name in _policies(args):
        variants[name] = Variant(**tuned["loads"][f"{load:g}"][name])
    rate, seeds = load * tuned["capacity"], range(1, args.seeds + 1)
    names = [*variants, BOUND]
    runs = [
        (variants[name] if name in variants else Variant(BOUND)).run(case, rate, seed)
        for name in names
        for seed in seeds
    ]
    figures = iter(store.get(runs))
    found = {name: [next(figures) for _ in seeds] for name in names}
    bound = sum(f["attainment"] for f in found.pop(BOUND)) / args.seeds
    cell = judge_cell(case.name, load, found)
    return {**cell, "rate": rate, "bound": bound}, bound


def _write(
    args: argparse.Namespace,
    cells: Sequence[dict[str, Any]],
    bounds: dict[tuple[str, float], float],
    tunings: dict[str, Any],
    shortfalls: Sequence[str],
) -> None:
    """Prints the matrix, and writes it with every figure and the plots."""
    lines = [table(cells, bounds)] if cells else []
    if (gain := mean_gain(cells)) is not None:
        lines.append(f"At loads of 1 and more `{OURS}` is {gain:+.3f} of the best rivals.")
    lines.append("\n".join(f"- {text}" for text in shortfalls) or "Nothing falls short.")
    text = "\n\n".join(lines)
    print(text)
    args.output.mkdir(parents=True, exist_ok=True)
    report = {**_about(args), "cells": list(cells), "shortfalls": list(shortfalls)}
    (args.output / "matrix.json").write_text(json.dumps(report, indent=1) + "\n")
    head = f"`{report['command']}`, {report['date']}, {report['processor']}"
    (args.output / "matrix.md").write_text(f"{head}\n\n{text}\n")
    if args.no_plots:
        return
    from octavo.engine.simulation.plots import plot_loads

    for name in dict.fromkeys(cell["workload"] for cell in cells):
        of_case = [cell for cell in cells if cell["workload"] == name]
        title = f"{name}: capacity {tunings[name]['capacity']:.3g} requests a second"
        plot_loads(of_case, args.output / f"{name}.svg", title=title)
    title = "mean of all workloads, each in capacities of its own"
    plot_loads(mean_by_load(cells), args.output / "mean.svg", title=title)


def _about(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures were made with; folders of this machine are left out."""
    given = {"only": args.only, "loads": args.loads, "policies": args.policies,
             "num-requests": args.num_requests, "workers": args.workers}  # fmt: skip
    if args.command == "evaluate":
        given["seeds"] = args.seeds
    words = [f"python -m benchmarks.goodput_matrix {args.command}"]
    for name, value in given.items():
        if name == "only":
            words += [f"--only {workload}" for workload in value or ()]
        elif value is not None:
            shown = ",".join(f"{v:g}" for v in value) if isinstance(value, tuple) else value
            words.append(f"--{name} {shown}")
    return {**about_machine(), "command": " ".join(words)}


def _store(args: argparse.Namespace) -> RunStore:
    return RunStore(
        args.output / "runs.jsonl",
        trace_dir=args.trace_dir,
        workers=args.workers,
        deadline_s=time.monotonic() + 60 * args.minutes,
    )


def _cases(args: argparse.Namespace) -> list[Case]:
    cases = [get_case(name) for name in args.only] if args.only else list(CASES)
    if args.num_requests is not None:
        cases = [replace(case, num_requests=args.num_requests) for case in cases]
    return cases


def _policies(args: argparse.Namespace) -> list[str]:
    names = args.policies.split(",") if args.policies else list(RIVALS)
    for name in names:
        if name not in RIVALS:
            raise InvalidConfigError("policies", name, ", ".join(RIVALS))
    return names


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_runs(store: RunStore, begun_s: float) -> None:
    _say(
        f"{store.num_made} runs in {store.made_s:.0f} core-seconds, {store.num_kept} kept; "
        f"{time.monotonic() - begun_s:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
