"""Routing policies beside each other in simulated fleets: attainment by workload and load.

    python -m benchmarks.router_matrix --replicas 4 --seeds 3
    python -m benchmarks.router_matrix --replicas 4,32 --only multi-turn --loads 1,1.3
    python -m benchmarks.router_matrix --replicas 4 --beside report-age-1 --only mix

A load of 1 is the number of replicas times what one of them serves with 95% of its requests on
time (`CASES`). All policies of a cell serve the same requests, seed by seed; requests that arrive
before `--warm-up` are not counted. Runs are kept in the output's folder, and a command that was
broken off goes on where it stopped. `--minutes` ends it after the run under way; cells that lack a
run are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.machine import about_machine
from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.fleet.fleet import FleetOptions, simulate_fleet
from octavo.engine.simulation.fleet.machines import Machine
from octavo.engine.simulation.fleet.replica import ReplicaOptions
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME
from octavo.engine.simulation.workloads.spec import Extent, generated_workload

ROOT = Path(__file__).resolve().parents[1]
OURS = "forecast"
RIVALS = ("round_robin", "power_of_two", "least_work", "prefix_affinity", "session_affinity")
LOADS = (0.8, 1.0, 1.3)
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Two-sided 95% quantiles of Student's t by number of seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A workload, and the replicas that serve it.

    Attributes:
        name, source: of the workload, and as `--workload` takes it.
        kv_tokens, max_model_len: of a replica.
        capacity: requests a second that one replica serves with 95% on time.
    """

    name: str
    source: str
    kv_tokens: int
    max_model_len: int
    capacity: float


CASES = (
    Case(name="multi-turn", source="sessions", kv_tokens=200_000, max_model_len=32_768,
         capacity=0.663),
    Case(name="agents", source="agents", kv_tokens=64_000, max_model_len=32_768, capacity=3.45),
    Case(name="mix", source="mix", kv_tokens=200_000, max_model_len=32_768, capacity=1.246),
    Case(name="reasoning", source="reasoning", kv_tokens=400_000, max_model_len=16_384,
         capacity=1.2),
)  # fmt: skip
"""Capacities of the first three are those of `goodput_matrix`."""

BESIDE: dict[str, dict[str, Any]] = {
    "plain": {},
    "report-age-1": {"report_age_s": 1.0},
    "four-fronts": {"num_fronts": 4},
    "mixed-speeds": {"speeds": (1.3, 0.7)},
}
"""Cells beside those of the matrix, by what is different there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    case: Case
    num_replicas: int
    router: str
    load: float
    seed: int
    beside: str
    duration_s: float
    warm_up_s: float

    @property
    def key(self) -> str:
        """All that its figures depend on, beside the sources."""
        return json.dumps(asdict(self), sort_keys=True)


SOURCES = (
    "engine/*.py",
    "engine/kv/**/*.py",
    "engine/routing/*.py",
    "engine/scheduler/**/*.py",
    "engine/simulation/**/*.py",
)
"""What a run's figures come from."""


def source_hash() -> str:
    """Digest of the sources that a run's figures come from; changes with any of them."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in ROOT.glob(pattern)}):
        digest.update(f"{path.relative_to(ROOT)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def figures(run: Run) -> dict[str, Any]:
    """A run's figures, made now. Fit for JSON."""
    begun_s, case = time.process_time(), run.case
    workload = generated_workload([case.source], Extent(duration_s=run.duration_s))
    arrivals = workload.traffic(run.num_replicas * case.capacity * run.load, run.seed)
    limits = replica_limits(kv_tokens=case.kv_tokens, max_model_len=case.max_model_len)
    machine = Machine(limits=limits, step_time=NIYAMA_STEP_TIME)
    changes = dict(BESIDE[run.beside])
    speeds = changes.pop("speeds", (1.0,))
    options = FleetOptions(
        num_replicas=run.num_replicas,
        router=run.router,
        seed=run.seed,
        stops_when_all_late=True,
        replica=ReplicaOptions(
            scheduler_args={"policy": "auto", "enable_prefix_caching": True},
            max_tokens=max(2048, workload.max_output),
        ),
        **changes,
    )
    machines = [(replace(machine, speed=speed), 1.0) for speed in speeds]
    report = simulate_fleet(arrivals, machines, options)
    counted = [record for record in report.records if record.arrival_s >= run.warm_up_s]
    summary = report.summary()
    return {
        "attainment": sum(record.is_on_time for record in counted) / max(1, len(counted)),
        "num_requests": len(counted),
        "cached_share": summary["cached_share"],
        "refused": summary["num_refused"],
        "forecast_attainment": summary["forecast_attainment"],
        "run_s": time.process_time() - begun_s,
        "num_turns": report.num_turns,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the matrix; 1 if a cell falls short or lacks runs."""
    args = _parser().parse_args(argv)
    try:
        runs = _runs(args)
    except InvalidConfigError as error:
        print(f"router_matrix: {error}", file=sys.stderr)
        return 2
    kept = _make(runs, args)
    cells = judge(runs, kept)
    text = table(cells)
    print(text)
    done = sum(run.key in kept for run in runs)
    args.output.mkdir(parents=True, exist_ok=True)
    words = " ".join(sys.argv[1:] if argv is None else argv)
    report = {
        **about_machine(), "command": f"python -m benchmarks.router_matrix {words}".strip(),
        "runs": f"{done} of {len(runs)}", "cells": cells,
    }  # fmt: skip
    (args.output / "matrix.json").write_text(json.dumps(report, indent=1) + "\n")
    head = f"`{report['command']}`, {report['date']}, {report['processor']}, {report['runs']} runs"
    (args.output / "matrix.md").write_text(f"{head}\n\n{text}\n")
    return 0 if done == len(runs) and all(c["ahead"] >= 0 for c in cells) else 1


def judge(runs: Sequence[Run], kept: dict[str, Any]) -> list[dict[str, Any]]:
    """Each cell's attainments, and by how much ours is ahead of the best rival, paired by seed.

    Seeds that lack a policy's run are left out; so is a cell without a whole seed.
    """
    by_cell: dict[tuple[Any, ...], dict[str, dict[int, dict[str, Any]]]] = {}
    for run in runs:
        found = by_cell.setdefault((run.num_replicas, run.case.name, run.load, run.beside), {})
        of_policy = found.setdefault(run.router, {})
        if run.key in kept:
            of_policy[run.seed] = kept[run.key]
    cells = []
    for (num, name, load, beside), policies in by_cell.items():
        seeds = sorted(set.intersection(*(set(found) for found in policies.values())))
        if not seeds:
            continue
        means = {
            policy: sum(found[seed]["attainment"] for seed in seeds) / len(seeds)
            for policy, found in policies.items()
        }
        rivals = {policy: mean for policy, mean in means.items() if policy != OURS}
        best = max(rivals, key=rivals.__getitem__)
        gaps = [
            policies[OURS][seed]["attainment"] - policies[best][seed]["attainment"]
            for seed in seeds
        ]
        cells.append(
            {
                "replicas": num, "workload": name, "load": load, "beside": beside,
                "num_seeds": len(seeds), "attainment": means, "best_rival": best,
                "ahead": sum(gaps) / len(gaps), "interval": _interval(gaps),
            }
        )  # fmt: skip
    return cells


def _interval(gaps: Sequence[float]) -> float | None:
    """Half of the 95% interval of a mean of paired gaps; None of fewer than two."""
    if len(gaps) < 2:
        return None
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
    return T_95.get(len(gaps), 2.3) * math.sqrt(variance / len(gaps))


def table(cells: Sequence[dict[str, Any]]) -> str:
    """The cells for people, with the mean gain at loads of 1 and more."""
    names = list(cells[0]["attainment"]) if cells else []
    lines = [
        f"| replicas | workload | load | {' | '.join(names)} | ahead of the best rival |",
        f"|---|---|---|{'---|' * (len(names) + 1)}",
    ]
    for cell in cells:
        figures = (
            f"**{value:.3f}**" if name == cell["best_rival"] else f"{value:.3f}"
            for name, value in cell["attainment"].items()
        )
        spread = "" if cell["interval"] is None else f" ± {cell['interval']:.3f}"
        where = "" if cell["beside"] == "plain" else f", {cell['beside']}"
        lines.append(
            f"| {cell['replicas']}{where} | {cell['workload']} | {cell['load']:g} "
            f"| {' | '.join(figures)} | {cell['ahead']:+.3f}{spread} |"
        )
    full = [cell["ahead"] for cell in cells if cell["load"] >= 1]
    if full:
        mean = sum(full) / len(full)
        lines += ["", f"At loads of 1 and more `{OURS}` is {mean:+.3f} of the best rivals."]
    return "\n".join(lines)


def _make(runs: Sequence[Run], args: argparse.Namespace) -> dict[str, Any]:
    """Figures by key; those that are kept are not made again."""
    path, sources, kept = args.output / "runs.jsonl", source_hash(), {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            if found["sources"] == sources:
                kept[found["key"]] = found["figures"]
    left = [run for run in runs if run.key not in kept][::-1]
    deadline_s = time.monotonic() + 60 * args.minutes
    args.output.mkdir(parents=True, exist_ok=True)
    # Where JAX runs threads, a process may not be forked.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(args.workers, context) as pool,
        open(path, "a", encoding="utf-8") as file,
    ):
        under_way = {}
        while left or under_way:
            while left and len(under_way) < args.workers and time.monotonic() < deadline_s:
                run = left.pop()
                under_way[pool.submit(figures, run)] = run
            if not under_way:
                break
            done = next(as_completed(under_way))
            run = under_way.pop(done)
            kept[run.key] = done.result()
            line = {"key": run.key, "sources": sources, "figures": kept[run.key]}
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(
                f"{run.num_replicas} {run.case.name} {run.load:g} {run.beside} {run.router} "
                f"seed {run.seed}: {kept[run.key]['attainment']:.3f}",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    return kept


def _runs(args: argparse.Namespace) -> list[Run]:
    known = {case.name: case for case in CASES}
    for name in args.only or ():
        if name not in known:
            raise InvalidConfigError("only", name, ", ".join(known))
    if args.beside not in BESIDE:
        raise InvalidConfigError("beside", args.beside, ", ".join(BESIDE))
    return [
        Run(
            case=known[name], num_replicas=num, router=router, load=load, seed=seed,
            beside=args.beside, duration_s=args.duration, warm_up_s=args.warm_up,
        )
        for num in args.replicas
        for seed in range(1, args.seeds + 1)
        for name in args.only or known
        for load in args.loads
        for router in (OURS, *args.rivals)
    ]  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=_list(int), default=[4], help="by commas (default: 4)")
    parser.add_argument("--only", action="append", metavar="WORKLOAD", help="(default: all)")
    parser.add_argument("--loads", type=_list(float), default=list(LOADS))
    parser.add_argument("--rivals", type=_list(str), default=list(RIVALS), help="by commas")
    parser.add_argument("--seeds", type=int, default=3, help="number of them (default: 3)")
    parser.add_argument("--beside", default="plain", help=", ".join(BESIDE))
    parser.add_argument("--duration", type=float, default=240.0, help="seconds of arrivals")
    parser.add_argument("--warm-up", type=float, default=60.0, help="of those, not counted")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=600.0, help="then no run is begun")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "router-matrix"
    )
    return parser


def _list(kind: Any) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
