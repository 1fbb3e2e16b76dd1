"""Swap against recompute, measured on this machine; and whether the scheduler picks the cheaper.

For each context length: seconds to copy its pages out and back through the engine's own copies,
seconds to compute it again through the engine's own steps, what the scheduler's cost model prices
both at, and which way it would go. Then one workload in a pool that its requests outgrow: every
victim swapped, every victim computed again, each as the cost model says, and never preempted; the
greedy streams must be the same. Both also over a link that is slowed down, by waiting, to the other
side of the crossing.

    python benchmarks/swap_break_even.py [--lengths "16 64 256 1024"] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import about_machine

from octavo.engine.engine import Engine
from octavo.engine.engine_arguments import engine_config
from octavo.engine.measuring.measurement import measure
from octavo.engine.process.own_process import prepare_to_compute
from octavo.engine.scheduler.policies import POLICIES
from octavo.engine.scheduler.policies.parameters import Parameters
from octavo.engine.scheduler.policy import Policy
from octavo.engine.simulation.workloads.bench_requests import BenchRequest, random_workload

SLOWER_BY = 4.0
"""A slowed link takes so many times as long as computing the pages' tokens again, both ways."""

MOST_OVER_SLOW_LINK = 256
"""Tokens of the longest context that is copied over it: it is slow."""


def main() -> None:
    """Measures and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="(default: the packaged one)")
    parser.add_argument("--lengths", default="8 16 32 64 128 256 512 1024", help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16, help="of the workload")
    parser.add_argument("--pages", type=int, default=120, help="of the pool they outgrow")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", help="write every figure as JSON")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split()]

    roomy = make_engine(args.model, num_kv_pages=1200)
    slots = roomy.limits.page_size
    page_bytes = roomy.executor.page_bytes
    recompute_s = {n: time_recompute(roomy, n, args.repeats, args.seed) for n in lengths}
    links = {"as it is": 0.0}
    links["slowed"] = SLOWER_BY * slots * recompute_s[lengths[-1]] / lengths[-1] / 2
    sections: dict[str, Any] = {}
    for link, extra_page_s in links.items():
        slow_down(roomy, extra_page_s)
        most = MOST_OVER_SLOW_LINK if extra_page_s else lengths[-1]
        rows = [row(roomy, n, recompute_s[n]) for n in lengths if n <= most]
        sections[link] = {"page_s": roomy.scheduler.forecast.page_copy_s, "lengths": rows}
        show(link, rows, roomy, page_bytes)
    slow_down(roomy, 0.0)

    workload = random_workload(
        args.requests, (48, 160), (48, 64), roomy.model_config.vocab_size, args.seed
    )
    alone, _ = serve(roomy, workload)
    runs = []
    for name, policy, extra_page_s in (
        ("every victim swapped", forced(True), 0.0),
        ("every victim computed again", forced(False), 0.0),
        ("as the cost model says", "fcfs", 0.0),
        ("as it says over the slowed link", "fcfs", links["slowed"]),
    ):
        engine = make_engine(args.model, num_kv_pages=args.pages, scheduling_policy=policy)
        slow_down(engine, extra_page_s)
        streams, figures = serve(engine, workload)
        engine.close()
        runs.append({"run": name, "same_streams": streams == alone, **figures})
        print(
            f"{name}: {figures['num_swaps']} swapped, {figures['num_recomputes']} computed again, "
            f"{figures['seconds']:.1f} s, streams "
            f"{'as without preemption' if streams == alone else 'DIFFER'}"
        )
    roomy.close()
    if args.output:
        settings = {name: value for name, value in vars(args).items() if name != "output"}
        report = {
            "about": about_machine(),
            "settings": settings,
            "page_bytes": page_bytes,
            "page_tokens": slots,
            "links": sections,
            "runs": runs,
        }
        Path(args.output).write_text(json.dumps(report, indent=1) + "\n")


def make_engine(model: str | None, **changes: Any) -> Engine:
    """An engine without a prefix cache, which would spare a recomputation."""
    prepare_to_compute(os.environ)
    given = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 1100,
        "host_kv_memory_bytes": 512 << 20,
        "enable_prefix_caching": False,
        "warm_up": "full",
        "scheduling_policy": "fcfs",
    }
    return Engine(engine_config(model, {**given, **changes}))


def time_recompute(engine: Engine, length: int, repeats: int, seed: int) -> float:
    """Seconds of steps in which a prompt of so many tokens is computed, nobody beside it."""
    seconds = []
    for turn in range(repeats):
        before_s = engine.executor.stats.busy_s
        vocab = engine.model_config.vocab_size
        measure(engine, random_workload(1, (length, length), (1, 1), vocab, seed + 100 * turn))
        seconds.append(engine.executor.stats.busy_s - before_s)
    return statistics.median(seconds)


def row(engine: Engine, length: int, recompute_s: float) -> dict[str, Any]:
    """A length: measured, priced, and what would be chosen."""
    forecast = engine.scheduler.forecast
    num_pages = -(-length // engine.limits.page_size)
    swap_s = 2 * engine.executor.time_page_copies(num_pages)
    forecast.observe_timed_copy(num_pages, swap_s / 2)
    priced_swap_s = 2 * num_pages * forecast.page_copy_s
    priced_recompute_s = forecast.prefill_s(length)
    return {
        "tokens": length,
        "pages": num_pages,
        "swap_s": swap_s,
        "recompute_s": recompute_s,
        "priced_swap_s": priced_swap_s,
        "priced_recompute_s": priced_recompute_s,
        "swaps": priced_swap_s < priced_recompute_s,
        "is_cheaper": (priced_swap_s < priced_recompute_s) == (swap_s < recompute_s),
    }


def show(link: str, rows: list[dict[str, Any]], engine: Engine, page_bytes: int) -> None:
    """The table of a link, and where the two ways cross."""
    gb_per_s = page_bytes / engine.scheduler.forecast.page_copy_s / 1e9
    print(f"the link {link}, {gb_per_s:.2f} GB/s as learned; milliseconds (priced)")
    for r in rows:
        print(
            f"  {r['tokens']:5} tokens  swap {1e3 * r['swap_s']:7.1f} "
            f"({1e3 * r['priced_swap_s']:7.1f})  recompute {1e3 * r['recompute_s']:7.1f} "
            f"({1e3 * r['priced_recompute_s']:7.1f})  "
            f"chooses {'swap' if r['swaps'] else 'recompute'}"
            f"{'' if r['is_cheaper'] else ', the dearer'}"
        )
    cheaper = [r["swap_s"] < r["recompute_s"] for r in rows]
    if len(set(cheaper)) == 1:
        print(f"  no crossing: {'swap' if cheaper[0] else 'recompute'} is cheaper at every length")
    for before, after in itertools.pairwise(rows):
        if (before["swap_s"] < before["recompute_s"]) != (after["swap_s"] < after["recompute_s"]):
            print(f"  they cross between {before['tokens']} and {after['tokens']} tokens")
    last = rows[-1]
    even = 2 * last["pages"] * page_bytes / last["recompute_s"] / 1e9
    print(f"  at {last['tokens']} tokens they cost the same over a link of {even:.2f} GB/s")


def slow_down(engine: Engine, extra_page_s: float) -> None:
    """Has every copied page take so much longer, as over a slower link; 0 takes that back."""
    copier = engine.executor._copier
    assert copier is not None

    def slowed(half: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            seconds, blocks = half(*args)
            wait_s = extra_page_s * len(args[-1])
            time.sleep(wait_s)
            return seconds + wait_s, blocks

        return run

    for name in ("_store", "_load"):
        copier.__dict__.pop(name, None)
        if extra_page_s:
            setattr(copier, name, slowed(getattr(copier, name)))
    # As when an engine starts.
    engine.scheduler.forecast.page_copy_s = engine.executor.time_page_copies(16) / 16


def forced(swaps: bool) -> str:
    """Adds "fcfs" with its choice between swap and recompute taken; gives its name."""
    name = f"fcfs-{'swap' if swaps else 'recompute'}"

    def make(parameters: Parameters) -> Policy:
        whole = POLICIES["fcfs"](parameters)
        return dataclasses.replace(whole, swap_or_recompute=lambda snapshot, victim: swaps)

    POLICIES[name] = make
    return name


def serve(engine: Engine, workload: list[BenchRequest]) -> tuple[list[Any], dict[str, Any]]:
    """Each request's greedy tokens, and what became of victims."""
    run = measure(engine, workload)
    load = engine.scheduler.load()
    streams = [list(output.outputs[0].token_ids) for output in run.outputs]
    return streams, {
        "seconds": run.duration_s,
        "num_swaps": load.num_swaps,
        "num_recomputes": load.num_recomputes,
    }


if __name__ == "__main__":
    main()
