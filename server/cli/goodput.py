"""`octavo bench goodput`: the highest rate at which enough of the offered requests are on time.

With `--simulate`, compares policies on a simulated replica; without it, drives an engine on this
machine, open loop, at the rates given. Prints a table; `--output` keeps it with every figure and
plots.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import InvalidConfigError
from octavo.server.cli.engine_args import add_engine_args, engine_args
from octavo.server.cli.simulation_args import (
    add_setting_args,
    quiet_faults,
    setting_from,
    workload_from,
)

if TYPE_CHECKING:
    from octavo.engine.simulation.goodput import Candidate
    from octavo.engine.simulation.settings import Setting

SIZED_CHUNKS = ("niyama", "slo", "static", "dynamic", "orca")
"""Policies that size their own steps, or do not chunk: no token budget is tuned for them."""

BUDGETS = (512, 1024, 2048)
"""Static token budgets that the others are tuned over."""

TUNING_SEED = 1_000


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
    parser.add_argument("--tolerance", type=float, default=0.03, help="of rates (default 0.03)")
    parser.add_argument("--no-oracle", action="store_true", help="leave out slo with true lengths")
    parser.add_argument("--jobs", type=int, default=0, help="processes (default: one a core)")
    parser.add_argument("--output", metavar="DIR", help="write table, figures and plots there")
    parser.add_argument("--no-plots", action="store_true", help="leave out plots (no matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_setting_args(parser)
    add_engine_args(parser, leave_out=("seed", "model", "num_decode_steps", "overlap"))


def run(args: argparse.Namespace) -> int:
    """Measures and shows."""
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
        command = "octavo " + " ".join(sys.argv[1:])
        (folder / "goodput.md").write_text(f"`{command}`\n\n{text}\n")
        if not args.no_plots:
            _plot(args, report, folder)
    return 0


def _simulated(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.engine.simulation.goodput_report import detail_table, goodput_table
    from octavo.engine.simulation.oracle import prefill_bound

    begun_s = time.perf_counter()
    setting, _ = setting_from(args)
    results = _compare(args, _candidates(args))
    rates = [row["rate"] for row in results[0]["rates"]]
    middle = rates[len(rates) // 2]
    seeds = range(args.seed, args.seed + args.seeds)
    budget = setting.limits.max_num_batched_tokens
    bounds = {
        rate: sum(
            prefill_bound(setting.traffic(rate, seed), setting.step_time, budget) for seed in seeds
        )
        / len(seeds)
        for rate in rates
    }
    wall_s = time.perf_counter() - begun_s
    text = (
        f"{goodput_table(results, bounds)}\n\nAt {middle:g} requests a second:\n\n"
        f"{detail_table(results, middle)}\n\n{args.seeds} seeds, {wall_s:.0f} s."
    )
    return {
        "setting": setting.name,
        "wall_s": wall_s,
        "bounds": [{"rate": rate, "attainment": bound} for rate, bound in bounds.items()],
        "results": results,
        "text": text,
    }


def _candidates(args: argparse.Namespace) -> list[Candidate]:
    from octavo.engine.scheduler.policies import policy_names
    from octavo.engine.simulation.goodput import Candidate

    names = args.policies.split() or policy_names()
    candidates = [Candidate(policy=name) for name in names]
    if "slo" in names and not args.no_oracle:
        candidates.append(Candidate(policy="slo:lengths=declared", knows_lengths=True))
    return candidates


def _compare(args: argparse.Namespace, candidates: list[Candidate]) -> list[dict[str, Any]]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = args.jobs or cores or 1
    if jobs == 1 or len(candidates) == 1:
        results = []
        for candidate in candidates:
            results.append(_measure(args, candidate))
            _say(results[-1])
        return results
    found: dict[int, dict[str, Any]] = {}
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        futures: dict[Future[dict[str, Any]], int] = {
            pool.submit(_measure, args, candidate): index
            for index, candidate in enumerate(candidates)
        }
        for future in as_completed(futures):
            found[futures[future]] = future.result()
            _say(future.result())
    return [found[index] for index in range(len(candidates))]


def _measure(args: argparse.Namespace, candidate: Candidate) -> dict[str, Any]:
    from octavo.engine.simulation.goodput import measure_goodput, tune_budget

    quiet_faults()
    setting, _ = setting_from(args)
    name = candidate.policy.partition(":")[0]
    if name not in SIZED_CHUNKS:
        budgets = args.token_budget or BUDGETS
        candidate = tune_budget(setting, candidate, budgets, seed=TUNING_SEED)
    return measure_goodput(
        setting,
        candidate,
        seeds=range(args.seed, args.seed + args.seeds),
        rates=_rates(args) or None,
        thresholds=_numbers("thresholds", args.thresholds),
        tolerance=args.tolerance,
    )


def _say(result: dict[str, Any]) -> None:
    if sys.stderr.isatty():
        first = next(iter(result["goodput"].values()))
        print(f"{result['label']}: {first['mean']:.2f}/s", file=sys.stderr)


async def _live(args: argparse.Namespace) -> dict[str, Any]:
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.engine import engine_config
    from octavo.engine.open_loop import run_open_loop
    from octavo.engine.simulation.goodput import Estimate
    from octavo.engine.simulation.goodput_report import detail_table, goodput_table
    from octavo.engine.simulation.metrics import merge_summaries

    rates = _rates(args) or [args.rate or 1.0]
    setting, _ = setting_from(args)
    given = engine_args(args)
    given["overlap"] = not args.no_overlap
    given |= {
        name: getattr(args, name)
        for name in ("model", "num_decode_steps")
        if getattr(args, name) is not None
    }
    policies = args.policies.split() or [given.get("scheduling_policy", "fcfs")]
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
                arrivals = [
                    a for a in arrivals if a.num_input + a.num_output <= engine.max_model_len
                ]
                summaries.append((await run_open_loop(engine, arrivals, seed=seed)).summary())
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


def _highest(rows: list[dict[str, Any]], threshold: float) -> float:
    """The highest of the rates tried up to which every one attained the threshold."""
    best = 0.0
    for row in rows:
        if row["attainment"]["mean"] < threshold:
            break
        best = row["rate"]
    return best


def _plot(args: argparse.Namespace, report: dict[str, Any], folder: Path) -> None:
    from octavo.engine.simulation import plots

    results = report["results"]
    plots.plot_goodput(results, folder / "goodput_by_rate.svg")
    plots.plot_attainment(results, folder / "attainment_by_class.svg")
    if not args.simulate:
        return
    setting, _ = setting_from(args)
    _plot_sweeps(args, setting, [result["policy"] for result in results], folder)


def _plot_sweeps(
    args: argparse.Namespace, setting: Setting, policies: list[str], folder: Path
) -> None:
    from octavo.engine.simulation import plots
    from octavo.engine.simulation.goodput import Candidate, run_once
    from octavo.engine.simulation.goodput_report import (
        break_even,
        budget_sweep,
        parameter_sweep,
    )

    rates = _rates(args) or list(setting.rates)
    busy, middle = rates[-2:][0], rates[len(rates) // 2]
    plots.plot_budgets(
        budget_sweep(setting, seed=args.seed, rate=busy), folder / "token_budgets.svg"
    )
    plots.plot_break_even(break_even(setting), folder / "swap_or_recompute.svg")
    best = "slo" if "slo" in policies else policies[0]
    timeline = run_once(setting, Candidate(policy=best), middle, args.seed, keep_timeline=True)
    plots.plot_timeline(timeline, folder / "timeline.svg", begin_s=60.0, end_s=70.0)
    if best != "slo":
        return
    rows = parameter_sweep(
        setting, best, "max_wait_s", (5, 10, 20, 40, 80, 160), seed=args.seed, rate=busy
    )
    lines = {key: key for key in rows[0] if key.endswith("attainment") or key == "batch served"}
    plots.plot_sweep(
        rows, folder / "aging_bound.svg", title=f"Aging bound at {busy:g} requests a second",
        x="max_wait_s", lines=lines,
    )  # fmt: skip


def _rates(args: argparse.Namespace) -> list[float]:
    return sorted(_numbers("rates", args.rates))


def _numbers(field: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part]
    except ValueError:
        raise InvalidConfigError(field, text, "numbers separated by commas") from None
