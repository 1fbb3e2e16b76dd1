"""What planning costs the host: p50 and p99 of `plan`, `apply_plan` and `commit`, in microseconds.

256 rows run and 1,000 requests wait, with no device: results are made up as fast as they can be.
One step is always in flight, as in the engine, which calls `apply_plan` once it has dispatched a
plan, so that it and `commit` run beside the device's work. Times are processor time of the one
thread, so that a machine with other work does not blur them.

    python benchmarks/planner.py [--steps 4000] [--rows 256] [--waiting 1000] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import deque
from collections.abc import Sequence

from octavo.engine.request import Request
from octavo.engine.sampling_params import SamplingParams
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import (
    RowTokens,
    StepLimits,
    StepPlan,
    StepResult,
    TokenRows,
)

PAGE_SIZE = 16

STEP_S = 0.02
"""What every made-up step takes, in seconds."""

SCENARIOS = {
    "decode": "every row decodes, nobody ends, 1,000 wait",
    "churn": "rows end and the waiting are admitted, prompts 16-256, outputs 16-128 tokens",
    "chat": "as churn, prompts 16-1,024, outputs 32-512 tokens: about one end a step",
    "shared": "as churn, prompts share their first 1,024 tokens in the prefix cache",
    "preempt": "as churn, in a pool too small for the running rows",
    "priority": "as churn, in four priority classes",
    "slo": "as decode, policy slo, every request with targets",
    "slo-churn": "as churn, policy slo, every request with targets",
    "slo-chat": "as chat, policy slo, every request with targets",
    "tenants": "as churn, policy auto, requests of 100 tenants",
    "slo-tenants": "as slo-churn, requests of 100 tenants",
    "multi": "decode of up to 8 iterations a dispatch, nobody waits",
}


def main() -> None:
    """Runs the scenarios and prints a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    figures = {
        name: measure(name, steps=args.steps, rows=args.rows, waiting=args.waiting)
        for name in args.scenario or SCENARIOS
    }
    if args.json:
        print(json.dumps(figures))
        return
    print(
        f"{'':10s}{'plan p50':>10s}{'p99':>8s}{'apply p50':>11s}{'p99':>8s}"
        f"{'commit p50':>12s}{'p99':>8s}   µs, for"
    )
    for name, values in figures.items():
        print(
            f"{name:10s}{values['plan_p50_us']:10.0f}{values['plan_p99_us']:8.0f}"
            f"{values['apply_p50_us']:11.0f}{values['apply_p99_us']:8.0f}"
            f"{values['commit_p50_us']:12.0f}{values['commit_p99_us']:8.0f}   {SCENARIOS[name]}"
        )


def measure(scenario: str, *, steps: int, rows: int, waiting: int) -> dict[str, float]:
    """Figures of one scenario."""
    rng = random.Random(1)
    churns = scenario not in ("decode", "multi", "slo")
    chats = scenario.endswith("chat")
    has_targets = scenario.startswith("slo")
    waiting = 0 if scenario == "multi" else waiting
    max_steps = 8 if scenario == "multi" else 1
    pages_per_row = 8 if scenario == "preempt" else 128
    if not churns:  # enough for all tokens of the run: nobody is preempted
        pages_per_row = max(1024, max_steps * (steps + 2 * rows) // PAGE_SIZE)
    limits = StepLimits(
        max_num_batched_tokens=2048,
        max_num_seqs=rows,
        max_num_steps=max_steps,
        max_prefill_rows=16,
        max_pages_per_seq=65536,
        page_size=PAGE_SIZE,
        num_pages=rows * pages_per_row,
        max_model_len=1 << 20,
        token_edges=(2048,),
    )
    policies = {"priority": "priority", "tenants": "auto"}
    scheduler = Scheduler(
        limits,
        policy="slo" if has_targets else policies.get(scenario, "fcfs"),
        num_decode_steps=max_steps,
    )
    shared = [rng.randrange(50_000) for _ in range(1024 if scenario == "shared" else 0)]
    num_added = 0

    now_s = 0.0

    prompt_lens, output_lens = ((16, 1024), (32, 512)) if chats else ((16, 256), (16, 128))

    def add() -> None:
        nonlocal num_added
        prompt = shared + [rng.randrange(50_000) for _ in range(rng.randint(*prompt_lens))]
        most = rng.randint(*output_lens) if churns else max_steps * steps + 10 * rows
        scheduler.add(
            Request(
                request_id=str(num_added),
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=most),
                seed=0,
                eos_token_ids=(2,),
                max_tokens=most,
                arrival_s=now_s if has_targets else float(num_added),
                tenant=str(num_added * 37 % 100) if scenario.endswith("tenants") else "",
                priority=rng.choice([0, 1, 2, 3]) if scenario == "priority" else 2,
                # Far enough that nobody is given up, and the queue stays as long as it is.
                ttft_target_s=rng.uniform(1e5, 2e5) if has_targets else None,
                tpot_target_s=0.05 if has_targets else None,
            ),
            now_s,
        )
        num_added += 1

    for _ in range(rows + waiting):
        add()
    plan_s: list[float] = []
    apply_s: list[float] = []
    commit_s: list[float] = []
    in_flight: deque[StepPlan] = deque()
    gc.collect()
    gc.freeze()
    warm_up = rows
    for step in range(warm_up + steps):
        while churns and scheduler.num_waiting < waiting:
            add()
        start = time.thread_time()
        plan = scheduler.plan(now_s)
        planned = time.thread_time()
        scheduler.apply_plan()
        apply_s.append(time.thread_time() - planned)
        plan_s.append(planned - start)
        assert plan is not None
        in_flight.append(plan)
        if len(in_flight) > 1:
            plan = in_flight.popleft()
            result = run(plan)
            start = time.thread_time()
            scheduler.commit(plan, result, now_s)
            # Here the engine lets go of it, and of who ended. Left to the next plan's name, that
            # would be counted among what planning takes.
            del plan, result
            commit_s.append(time.thread_time() - start)
        now_s += STEP_S
        if step == warm_up:
            plan_s.clear()
            apply_s.clear()
            commit_s.clear()
    scheduler.check_integrity()
    gc.unfreeze()
    return {
        "plan_p50_us": percentile(plan_s, 50),
        "plan_p99_us": percentile(plan_s, 99),
        "apply_p50_us": percentile(apply_s, 50),
        "apply_p99_us": percentile(apply_s, 99),
        "commit_p50_us": percentile(commit_s, 50),
        "commit_p99_us": percentile(commit_s, 99),
        "num_preemptions": scheduler.load().num_preemptions,
    }


def run(plan: StepPlan) -> StepResult:
    """A result in which no row stops."""
    prompts = [RowTokens((7,) if row.samples else ()) for row in plan.prefill_rows]
    if plan.num_steps == 1:
        rows: Sequence[RowTokens] = TokenRows([7] * len(plan.decode_rows), prompts)
    else:
        counts = plan.decode_rows.max_new_tokens.tolist()
        rows = [*(RowTokens((7,) * count) for count in counts), *prompts]
    return StepResult(rows=rows, duration_s=STEP_S)


def percentile(seconds: list[float], percent: int) -> float:
    """A percentile of times in seconds, in microseconds."""
    ordered = sorted(seconds)
    return 1e6 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


if __name__ == "__main__":
    main()
