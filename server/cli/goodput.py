"""`octavo bench goodput`: the highest rate at which enough of the offered requests are on time.

With `--simulate`, compares policies on a simulated replica; without it, drives an engine on this
machine, open loop, at the rates given. Prints a table; `--output` keeps it with every figure and
plots. The module is long because both forms share their options, rows and table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import InvalidConfigError
from octavo.server.cli.engine_args import add_engine_args, checked_engine_args, engine_args
from octavo.server.cli.simulation_args import (
    add_setting_args,
    notice_of_long_requests,
    quiet_faults,
    setting_from,
    workload_from,
)

if TYPE_CHECKING:
    from octavo.engine.simulation.goodput import Candidate, Runs
    from octavo.engine.simulation.settings import Setting
    from octavo.engine.simulation.workloads.traffic import Arrival

BUDGETS = (128, 256, 320, 352, 384, 416, 512, 1024, 2048)
"""Static token budgets that policies without a chunk size of their own are tuned over."""

TUNED = {
    "niyama": (
        "niyama:alpha=0", "niyama", "niyama:alpha=2", "niyama:alpha=8", "niyama:decode=due",
    ),
    "dynamic": ("dynamic:batch_size=8", "dynamic:batch_size=32", "dynamic:batch_size=128"),
}  # fmt: skip
"""Parameters that others are tuned over."""

UNTUNED = ("slo", "static", "orca")
"""Policies that are taken as they are: no token budget means anything to them."""

TUNING_SEEDS = (1_000, 1_001, 1_002)
"""Of traffic that nothing is measured with."""


def add_parser(kinds: Any) -> None:
    """Adds `goodput` to what `bench` measures."""
    parser = kinds.add_parser("goodput", help="requests on time", description=__doc__)
    parser.add_argument("--simulate", action="store_true", help="on a simulated replica")
    parser.add_argument("--policies", default="", help="names, separated by spaces (default: all)")
    parser.add_argument("--rates", default="", help="requests a second, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="of the traffic (default 3)")
    parser.add_argument("--seed", type=int, default=1, help="the first of them (default 1)")
    parser.add_argument("--thresholds", default="0.9,0.99", help="(default %(default)s)")
    parser.add_argument(
        "--token-budget", type=int, action="append", metavar="N",
        help=f"static budgets to tune over (default {BUDGETS})",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, default=0.06,
        help="how far from a rate that was run the result may be read off (default %(default)s)",
    )  # fmt: skip
    parser.add_argument("--no-oracle", action="store_true", help="leave out slo with true lengths")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: one a core)")
    parser.add_argument("--resume", metavar="FILE", help="keep runs there; go on where it ends")
    parser.add_argument("--output", metavar="DIR", help="write table, figures and plots there")
    parser.add_argument("--no-plots", action="store_true", help="leave out plots (no matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_setting_args(parser)
    add_engine_args(parser, leave_out=("seed", "model", "num_decode_steps", "overlap"))


def run(args: argparse.Namespace) -> int:
    """Measures and shows."""
    given = engine_args(args) if args.simulate else {}
    args.max_model_len = given.get("max_model_len")
    args.enable_prefix_caching = given.get("enable_prefix_caching", False)
    report = _simulated(args) if args.simulate else asyncio.run(_live(args))
    text = report.pop("text")
    if args.json:
        print(json.dumps(report))
    else:
        print(text)
    if args.output:
        folder = Path(args.output)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "goodput.json").write_text(json.dumps(report, indent=1) + "\n")
        command = "octavo " + shlex.join(sys.argv[1:])
        (folder / "goodput.md").write_text(f"`{command}`\n\n{text}\n")
        if not args.no_plots:
            _plot(args, report, folder)
    return 0


def _simulated(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.engine.simulation.goodput_report import (
        bound_line,
        class_table,
        detail_table,
        goodput_table,
        guarantee_table,
        keeps_guarantees,
        ratio_lines,
    )
    from octavo.engine.simulation.work_bound import work_bound

    begun_s = time.perf_counter()
    setting, _ = setting_from(args)
    if notice := notice_of_long_requests(setting):
        print(notice, file=sys.stderr)
    with _runs(args, setting) as (runs, jobs):
        results = _compare(args, setting, runs, jobs)
        rates = sorted({row["rate"] for result in results for row in result["rates"]})
        middle = rates[len(rates) // 2]
        seeds = range(args.seed, args.seed + args.seeds)
        bounds = {
            rate: sum(
                work_bound(
                    setting.traffic(rate, seed), setting.step_time, setting.limits,
                    max_tokens=setting.max_tokens, shares_prefixes=setting.enable_prefix_caching,
                )
                for seed in seeds
            )
            / len(seeds)
            for rate in rates
        }  # fmt: skip
        wall_s = time.perf_counter() - begun_s
        num_runs, run_s = len(runs), runs.run_s
    guarantees = guarantee_table(results)
    parts = [
        goodput_table(results, bounds),
        ratio_lines(results),
        bound_line(results, bounds),
        f"At {middle:g} requests a second:",
        detail_table(results, middle),
        "On time by class:",
        class_table(results, middle),
        guarantees and f"What is guaranteed:\n\n{guarantees}",
        f"{args.seeds} seeds, {num_runs} runs, {run_s:.0f} core-seconds; "
        f"{jobs} processes, {wall_s:.0f} s.",
    ]
    return {
        "setting": setting.name,
        "wall_s": wall_s,
        "num_runs": num_runs,
        "run_s": run_s,
        "jobs": jobs,
        "bounds": [{"rate": rate, "attainment": bound} for rate, bound in bounds.items()],
        "guarantees_kept": all(
            keeps_guarantees(row) for result in results for row in result["rates"]
        ),
        "results": results,
        "text": "\n\n".join(filter(None, parts)),
    }


@contextlib.contextmanager
def _runs(args: argparse.Namespace, setting: Setting) -> Iterator[tuple[Runs, int]]:
    """Where runs are made: here, or in a pool of processes."""
    from octavo.engine.simulation.goodput import Runs

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = args.jobs or cores or 1
    path = Path(args.resume) if args.resume else None
    if jobs == 1:
        quiet_faults()
        yield Runs(setting, path=path), 1
        return
    plain = {name: value for name, value in vars(args).items() if not callable(value)}
    with ProcessPoolExecutor(
        jobs,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_prepare,
        initargs=(argparse.Namespace(**plain),),
    ) as pool:

        def submit(candidate: Candidate, rate: float, seed: int) -> Future[dict[str, Any]]:
            return pool.submit(_run, candidate, rate, seed)

        yield Runs(setting, submit, path), jobs


_setting: Setting | None = None
"""Of a process of the pool: its traces are read once."""


def _prepare(args: argparse.Namespace) -> None:
    global _setting
    quiet_faults()
    _setting, _ = setting_from(args)


def _run(candidate: Candidate, rate: float, seed: int) -> dict[str, Any]:
    from octavo.engine.simulation.goodput import run_summary

    assert _setting is not None
    return run_summary(_setting, candidate, rate, seed)


def _variants(args: argparse.Namespace) -> list[list[Candidate]]:
    """Each policy, with what it is tuned over."""
    from octavo.engine.scheduler.policies import policy_names
    from octavo.engine.simulation.goodput import Candidate

    names = args.policies.split()
    if not names:
        names = [name for name in policy_names() if name != "auto"]
        for name in ("fcfs-shed", "edf-shed"):
            names.insert(names.index(name) + 1, f"{name}:begun=drop")
    variants = []
    for name in names:
        plain = name.partition(":")[0]
        if plain in UNTUNED or "token_budget" in name:
            variants.append([Candidate(policy=name)])
        elif plain in TUNED:
            texts = TUNED[plain] if name == plain else (name,)
            variants.append([Candidate(policy=text) for text in texts])
        else:
            budgets = args.token_budget or BUDGETS
            variants.append([Candidate(policy=name, token_budget=b) for b in budgets])
    if "slo" in names and not args.no_oracle:
        variants.append([Candidate(policy="slo:lengths=declared", knows_lengths=True)])
    return variants


def _compare(
    args: argparse.Namespace, setting: Setting, runs: Runs, jobs: int
) -> list[dict[str, Any]]:
    """Every policy's figures. Each waits for its own runs only, so that the pool is kept busy."""
    from octavo.engine.simulation.goodput import measure_goodput, tune

    def measure(variants: list[Candidate]) -> dict[str, Any]:
        least = setting.limits.max_num_seqs
        fitting = [v for v in variants if v.token_budget is None or v.token_budget >= least]
        result = measure_goodput(
            setting,
            tune(setting, fitting, seeds=TUNING_SEEDS, rates=_rates(args) or None, runs=runs),
            seeds=range(args.seed, args.seed + args.seeds),
            rates=_rates(args) or None,
            thresholds=_numbers("thresholds", args.thresholds),
            tolerance=args.tolerance,
            runs=runs,
        )
        _say(result)
        return result

    variants = _variants(args)
    if jobs == 1:
        return [measure(candidates) for candidates in variants]
    with ThreadPoolExecutor(len(variants)) as threads:
        return list(threads.map(measure, variants))


def _say(result: dict[str, Any]) -> None:
    if sys.stderr.isatty():
        first = next(iter(result["goodput"].values()))
        print(f"{result['label']}: {first['mean']:.2f}/s", file=sys.stderr)


async def _live(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.engine_arguments import engine_config
    from octavo.engine.measuring.open_loop import run_open_loop
    from octavo.engine.simulation.goodput_report import detail_table, goodput_table
    from octavo.engine.simulation.metrics import merge_summaries
    from octavo.engine.simulation.rate_search import Estimate

    setting, _ = setting_from(args)
    rates = _rates(args) or list(setting.rates)
    given = checked_engine_args(args)
    given["overlap"] = not args.no_overlap
    given |= {
        name: getattr(args, name)
        for name in ("model", "num_decode_steps")
        if getattr(args, name) is not None
    }
    policies = args.policies.split() or [given.get("scheduling_policy", "auto")]
    results = []
    for policy in policies:
        config = engine_config(None, {**given, "scheduling_policy": policy})
        engine = AsyncEngine(config, progress=sys.stderr.isatty())
        rows = []
        for rate in rates:
            summaries = []
            for seed in range(args.seed, args.seed + args.seeds):
                args.rate, args.seed = rate, seed
                arrivals = workload_from(args, setting)
                if not isinstance(arrivals, list):
                    raise InvalidConfigError("users", args.users, "simulated: this is open loop")
                fitting = _fitting(arrivals, engine.max_model_len)
                run = await run_open_loop(engine, fitting, seed=(policy, rate, seed))
                summaries.append(run.summary())
            args.seed -= args.seeds - 1
            share = [summary["attainment"] for summary in summaries]
            rows.append(
                {
                    "recompute_share": 0.0,
                    "swapped_pages_out": 0,
                    **merge_summaries(summaries),
                    "rate": rate,
                    "attainment": Estimate.of(share).to_dict(),
                    "on_time_per_s": rate * sum(share) / len(share),
                }
            )
        await engine.shutdown()
        goodput = {
            f"{t:g}": {"mean": _highest(rows, t), "ci95": None}
            for t in _numbers("thresholds", args.thresholds)
        }
        results.append(
            {"policy": policy, "label": policy, "token_budget": None, "knows_lengths": False,
             "goodput": goodput, "rates": rows}
        )  # fmt: skip
    text = f"{goodput_table(results)}\n\n{detail_table(results, rates[len(rates) // 2])}"
    return {"setting": "live", "results": results, "text": text}


def _fitting(arrivals: list[Arrival], max_model_len: int) -> list[Arrival]:
    """The requests that an engine takes; says how many it leaves out."""
    fitting = [a for a in arrivals if a.num_input + a.num_output <= max_model_len]
    if len(fitting) < len(arrivals):
        print(
            f"octavo: {len(arrivals) - len(fitting)} of {len(arrivals)} requests are left out: "
            f"longer than max_model_len = {max_model_len}",
            file=sys.stderr,
        )
    return fitting


def _highest(rows: list[dict[str, Any]], threshold: float) -> float:
    """The highest of the rates tried up to which every one attained the threshold."""
    best = 0.0
    for row in rows:
        if row["attainment"]["mean"] < threshold:
            break
        best = row["rate"]
    return best


def _plot(args: argparse.Namespace, report: dict[str, Any], folder: Path) -> None:
    from octavo.engine.observability.event_log import EventLines
    from octavo.engine.observability.schedule import ScheduleReader
    from octavo.engine.simulation import plots
    from octavo.engine.simulation.goodput import Candidate, run_once

    results = report["results"]
    plots.plot_goodput(results, folder / "goodput_by_rate.svg")
    plots.plot_attainment(results, folder / "attainment_by_class.svg")
    if not args.simulate:
        return
    setting, _ = setting_from(args)
    reader = ScheduleReader()

    def read(line: dict[str, Any]) -> None:
        if line["t"] < 65.0:
            reader.read(line)

    rates = _rates(args) or list(setting.rates)
    busy = rates[2 * len(rates) // 3]
    run_once(setting, Candidate(policy="slo"), busy, args.seed, observer=EventLines(read))
    plots.plot_schedule(reader.schedule.since(60.0), folder / "timeline.svg")


def _rates(args: argparse.Namespace) -> list[float]:
    return sorted(_numbers("rates", args.rates))


def _numbers(field: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError:
        raise InvalidConfigError(field, text, "numbers separated by commas") from None
