"""How fast simulations run: decode tokens a second on one core, through the real scheduler.

256 rows decode; three ways to fill them:

- `decode`: a batch of 256 at a time, outputs of 512 tokens, 8 iterations a dispatch;
- `serve`: requests of 64-256 prompt and 256-768 output tokens arrive as fast as they are served,
  up to 8 iterations a dispatch, as the engine is set up for by default;
- `single`: the same with one iteration a dispatch, so that every token is planned by itself.

Processor time, so that a machine with other work does not blur it.

    python benchmarks/simulation_speed.py [--policy slo] [--requests 2000] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from typing import Any

from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.simulate import simulate
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

CHAT = TrafficClass(name="chat", ttft_target_s=5.0, tpot_target_s=0.2)


SCENARIOS = {"decode": 8, "serve": 8, "single": 1}
"""Scenario -> decode iterations a dispatch."""


def main() -> None:
    """Runs each scenario and prints a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", action="append", help="(default: fcfs)")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--requests", type=int, default=2048)
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), action="append")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = [
        measure(policy, scenario, args.rows, args.requests)
        for policy in args.policy or ["fcfs"]
        for scenario in args.scenario or SCENARIOS
    ]
    if args.json:
        print(json.dumps(results))
        return
    print(f"{'policy':12}{'scenario':10}{'tokens/s':>12}{'µs a step':>11}{'tokens a step':>15}")
    for result in results:
        print(
            f"{result['policy']:12}{result['scenario']:10}{result['tokens_per_s']:12,.0f}"
            f"{result['us_per_step']:11.0f}{result['tokens_per_step']:15.0f}"
        )


def measure(policy: str, scenario: str, num_rows: int, num_requests: int) -> dict[str, Any]:
    """Decode tokens a second of processor time."""
    rng = random.Random(1)
    batches = scenario == "decode"
    arrivals = [
        Arrival(
            request_id=str(index),
            arrival_s=100.0 * (index // num_rows) if batches else 0.03 * index,
            num_input=128 if batches else rng.randint(64, 256),
            num_output=512 if batches else rng.randint(256, 768),
            traffic_class=CHAT,
        )
        for index in range(num_requests)
    ]
    num_steps = SCENARIOS[scenario]
    limits = replica_limits(
        kv_tokens=num_rows * 1024, num_rows=num_rows, max_num_steps=num_steps, max_model_len=4096
    )
    scheduler = Scheduler(limits, policy=policy, num_decode_steps=num_steps)
    gc.collect()
    begun_s = time.process_time()
    report = simulate(arrivals, scheduler, NIYAMA_STEP_TIME, max_tokens=2048)
    seconds = time.process_time() - begun_s
    tokens = report.num_output_tokens
    return {
        "policy": policy,
        "scenario": scenario,
        "tokens_per_s": tokens / seconds,
        "us_per_step": 1e6 * seconds / report.num_steps,
        "tokens_per_step": tokens / report.num_steps,
    }


if __name__ == "__main__":
    main()
