"""Random simulations that try to break the scheduler: `python -m octavo.engine.simulation.soak`.

Each scenario is drawn from one number: limits, windows, recurrent layers, policy, arrivals,
priorities, targets, tenants, shared prefixes, bursts that begin alike, clients that leave, slow and
failed steps, failed and stuck page copies; in some, most requests are embeddings. A device that
knows what every page holds checks each plan (`CheckedExecutor`); the scheduler's own integrity is
proved every few turns, that estimates of work are exact and no page is computed twice included (but
where windows let go of pages, or a state has no snapshot); every answer must be what the request
would say with no fault at all, and every vector the sum over the whole text. A failure prints the
number that plays it again.

    python -m octavo.engine.simulation.soak --steps 1000000
    python -m octavo.engine.simulation.soak --scenario 4711
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.engine.pooling.params import PoolingParams
from octavo.engine.request import Priority, Request
from octavo.engine.scheduler.policies import get_policy, policy_names
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.checked_executor import BrokenPlanError, CheckedExecutor
from octavo.engine.simulation.executor import (
    HostOverhead,
    SwapLink,
    hidden_states,
    output_tokens,
)
from octavo.engine.simulation.faults import Faults
from octavo.engine.simulation.guarantees import longest_wait, tenant_gap
from octavo.engine.simulation.simulate import SimulationReport, simulate
from octavo.engine.simulation.step_time import LinearCost, TwoRegimeStepTime
from octavo.engine.simulation.workloads.prompts import block_segments
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass
from octavo.models.pooling_config import POOLINGS

PAGE_SIZE = 4
LONGEST_PROMPT = 24
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, 5), (6,), (None, 9, 9, 9, 3), (12, 2))
"""By cache group, of the models that give back pages."""
HOLDS_BACK = ("static", "dynamic")
"""Policies that let a free device wait; all others must keep it busy while anybody waits."""

_STEP_TIME = TwoRegimeStepTime(
    LinearCost(base=0.01, token=1e-4, prefill=2e-4, decode=1e-4, decode_context=1e-6,
               prefill_context=2e-6),
    LinearCost(base=0.012, token=2e-4, prefill=3e-4, decode=1e-4, decode_context=1e-6,
               prefill_context=2e-6),
    edge=16,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One random simulation, all of it drawn from `number`."""

    number: int
    policy: str
    limits: StepLimits
    scheduler_args: dict[str, Any]
    options: dict[str, Any]
    arrivals: list[Arrival]
    max_tokens: int


def draw_scenario(number: int) -> Scenario:
    """The scenario of a number; the same on every machine."""
    rng = random.Random(f"scenario {number}")
    names = [name for name in policy_names() if name not in ("static", "auto")]
    policy = rng.choice(names)
    if policy == "slo":
        # Short bounds, so that they are reached; by number, so that scenarios stay what they were.
        policy = ("slo", "auto", "slo:max_wait_s=0.5", "slo:max_wait_s=0.1,late=serve")[number % 4]
    max_tokens = rng.choice((4, 12, 24))
    longest = LONGEST_PROMPT
    least_pages = -(-(longest + max_tokens) // PAGE_SIZE)
    num_rows = rng.randint(1, 6)
    num_pages = 1 + least_pages + rng.choice((0, 1, 4, 12, 40))
    budget = max(num_rows, rng.choice((4, 8, 16, 48)))
    chunked = rng.random() < 0.8 or budget < longest + max_tokens
    limits = StepLimits(
        max_num_batched_tokens=budget,
        max_num_seqs=num_rows,
        max_num_steps=rng.choice((1, 2, 8)),
        max_prefill_rows=rng.randint(1, num_rows),
        max_pages_per_seq=64,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        max_model_len=128,
        token_edges=tuple(sorted({4, 8, 16, budget} - set(range(budget + 1, 100)))),
        num_host_pages=rng.choice((0, 4, 16, 64)),
        run_pages=(1, 1, 3)[number % 3],
    )
    faulty = rng.random() < 0.7
    faults = Faults(
        slow_step_share=rng.choice((0.0, 0.05)),
        step_noise=rng.choice((0.0, 0.2)),
        failed_step_share=rng.choice((0.0, 0.0, 0.01)),
        hung_step_share=(0.0, 0.0, 0.01)[number // 3 % 3],
        hung_step_s=1.0,
        failed_transfer_share=rng.choice((0.0, 0.2)),
        stuck_transfer_share=rng.choice((0.0, 0.1)),
        stuck_transfer_s=0.5,
        cancelled_share=rng.choice((0.0, 0.2)),
    )
    classes = [_draw_class(rng, index) for index in range(rng.randint(1, 4))]
    rate = rng.choice((2.0, 10.0, 50.0))
    now_s = 0.0
    arrivals = []
    for index in range(rng.randint(5, 60)):
        now_s += rng.expovariate(rate)
        arrivals.append(
            Arrival(
                request_id=str(index),
                arrival_s=now_s,
                num_input=(num_input := rng.randint(1, longest)),
                num_output=rng.randint(1, max_tokens),
                traffic_class=rng.choice(classes),
                segments=block_segments(
                    (rng.randint(0, 2), rng.randint(0, 2)) if rng.random() < 0.5 else (),
                    block_tokens=8,
                    num_tokens=num_input,
                ),
            )
        )
    if number % 4 == 1:
        arrivals = _in_bursts(arrivals, random.Random(f"bursts {number}"))
    scenario = Scenario(
        number=number,
        policy=policy,
        limits=limits,
        scheduler_args={
            "policy": policy,
            "enable_prefix_caching": rng.random() < 0.7,
            "enable_chunked_prefill": chunked,
            "watermark": rng.choice((0.0, 0.05)),
            "num_decode_steps": limits.max_num_steps,
            "explain": rng.random() < 0.2,
        },
        options={
            "overlap": rng.random() < 0.7,
            "faults": faults if faulty else Faults(),
            "seed": number,
            "link": SwapLink(bytes_per_page=1 << 20, bytes_per_s=rng.choice((1e8, 1e9, 1e11))),
            "host": HostOverhead(plan_s=rng.choice((0.0, 1e-3)), commit_s=0.0),
            "check_every": 7,
            "keep_timeline": policy.startswith("slo:"),
        },
        arrivals=arrivals,
        max_tokens=max_tokens,
    )
    if number % 6 == 3:
        scenario = with_windows(scenario, WINDOWS[number // 6 % len(WINDOWS)])
    if number % 12 == 2:
        scenario = with_states(scenario)
    if is_pooled(number):
        scenario = _pooled(scenario)
    return _flooded(scenario) if number % 10 == 7 else scenario


def is_pooled(number: int) -> bool:
    """Whether most requests of a scenario are embeddings."""
    return number % 7 in (4, 5)


def with_windows(scenario: Scenario, windows: tuple[int | None, ...]) -> Scenario:
    """The same requests to a model of these cache groups, in a pool that is as tight."""
    plain = scenario.limits
    limits = replace(plain, windows=windows)
    longest = LONGEST_PROMPT + scenario.max_tokens
    num_spare = plain.num_pages - 1 - plain.needs.to_compute(longest)
    num_pages = 1 + limits.needs.to_compute(longest) + num_spare * len(windows)
    return replace(scenario, limits=replace(limits, num_pages=num_pages))


def with_states(scenario: Scenario) -> Scenario:
    """The same requests to a model with recurrent layers, which the host tier does not serve, and
    room for few snapshots."""
    rng = random.Random(f"states {scenario.number}")
    limits = replace(
        scenario.limits,
        num_host_pages=0,
        has_states=True,
        num_snapshots=rng.choice((0, 1, 2, 5, 20)),
        snapshot_tokens=PAGE_SIZE * rng.choice((1, 1, 2)),
    )
    return replace(scenario, limits=limits)


def _flooded(scenario: Scenario) -> Scenario:
    """The same requests under `auto`, promised nothing, of three tenants of which one sends most;
    no step fails, as what is computed again is charged once."""
    rng = random.Random(f"tenants {scenario.number}")
    tenants = ("flood",) * rng.randint(1, 6) + ("a", "b")
    arrivals = [
        replace(
            arrival,
            arrival_s=arrival.arrival_s / 10,
            traffic_class=TrafficClass(
                name=arrival.traffic_class.name,
                priority=arrival.traffic_class.priority,
                tenant=rng.choice(tenants),
            ),
        )
        for arrival in scenario.arrivals
    ]
    faults = replace(scenario.options["faults"], failed_step_share=0.0, hung_step_share=0.0)
    return replace(
        scenario,
        policy="auto",
        scheduler_args={**scenario.scheduler_args, "policy": "auto"},
        options={**scenario.options, "faults": faults, "keep_timeline": True},
        arrivals=arrivals,
    )


def _in_bursts(arrivals: list[Arrival], rng: random.Random) -> list[Arrival]:
    """The same requests, but they come several at once, and most begin alike."""
    every_s = rng.choice((0.05, 0.2, 1.0))
    together = []
    for arrival in arrivals:
        num_input = max(arrival.num_input, rng.choice((1, 17, 24)))
        block_ids = (0, rng.randint(0, 1), rng.randint(0, 1)) if rng.random() < 0.9 else ()
        together.append(
            replace(
                arrival,
                arrival_s=arrival.arrival_s // every_s * every_s,
                num_input=num_input,
                segments=block_segments(block_ids, block_tokens=8, num_tokens=num_input),
            )
        )
    return together


def _pooled(scenario: Scenario) -> Scenario:
    """The same requests, but most are embeddings, of every pooling; more steps fail, as what a sum
    has lacks what they computed."""
    rng = random.Random(f"pooled {scenario.number}")
    asked = [PoolingParams(pooling=name, normalize=False) for name in POOLINGS]
    arrivals = [
        replace(arrival, pooling=rng.choice(asked)) if rng.random() < 0.6 else arrival
        for arrival in scenario.arrivals
    ]
    faults = scenario.options["faults"]
    if faults.failed_step_share:
        faults = replace(faults, failed_step_share=0.1)
    return replace(scenario, arrivals=arrivals, options={**scenario.options, "faults": faults})


def whole_sum(request: Request) -> NDArray[np.float32]:
    """What a pooled request sums, of the whole text at once."""
    assert request.pooling is not None
    states = hidden_states(request.prompt_token_ids, 0)
    parts = {"last": states[-1:], "cls": states[:1], "mean": states}
    total: NDArray[np.float32] = parts[request.pooling.pooling or ""].sum(axis=0)
    return total


def play(scenario: Scenario) -> SimulationReport:
    """Plays a scenario to its end.

    Raises:
        AssertionError: something that must hold does not.
    """
    numbers = {arrival.request_id: n for n, arrival in enumerate(scenario.arrivals)}
    lengths = {arrival.request_id: arrival.num_output for arrival in scenario.arrivals}

    summed: set[str] = set()

    def check_pooled(request: Request, pooled: NDArray[np.float64]) -> None:
        assert np.array_equal(pooled, whole_sum(request)), f"{request.request_id}: {pooled}"
        assert request.pooling is not None
        is_cached = request.num_cached_tokens > 0
        assert not (request.pooling.needs_every_token and is_cached), request.request_id
        summed.add(request.request_id)

    def check_end(request: Request) -> None:
        if request.pooling is not None:
            assert not request.output_token_ids, request.request_id
            is_whole = request.status.value == "stop"
            assert is_whole == (request.request_id in summed), request.request_id
            return
        said = output_tokens(numbers[request.request_id], lengths[request.request_id])
        got = tuple(request.output_token_ids)
        assert got == said[: len(got)], f"{request.request_id} said something else"
        if request.status.value in ("stop", "length"):
            assert len(got) == len(said), request.request_id

    report = simulate(
        scenario.arrivals,
        Scheduler(scenario.limits, **scenario.scheduler_args),
        _STEP_TIME,
        max_tokens=scenario.max_tokens,
        executor_type=CheckedExecutor,
        on_end=check_end,
        on_pooled=check_pooled,
        max_turns=30_000,
        idle_tick_s=0.01,
        **scenario.options,
    )
    assert len(report.records) == len(scenario.arrivals)
    assert all(record.status for record in report.records), "a request never ended"
    assert report.load.num_owned_pages == 0, "pages were not given back"
    assert report.load.num_running == report.load.num_waiting == 0
    if scenario.policy.partition(":")[0] not in HOLDS_BACK:
        assert report.num_held_back == 0, "the device waited while somebody could be served"
    max_wait_s = get_policy(scenario.policy).max_wait_s
    if report.timeline and max_wait_s is not None:
        wait = longest_wait(report, max_wait_s)
        assert wait["is_kept"], f"somebody was overtaken past the bound on waiting: {wait}"
    if scenario.policy == "auto" and report.timeline and not report.num_faults[0]:
        gap = tenant_gap(
            report,
            page_size=PAGE_SIZE,
            num_rows=scenario.limits.max_num_seqs,
            max_tokens=scenario.max_tokens,
        )
        assert gap["is_kept"], f"a tenant was served too much more than another: {gap}"
    failed = [record for record in report.records if record.status == "failed"]
    assert not failed or report.num_faults[0], "requests failed without a fault"
    return report


def _draw_class(rng: random.Random, index: int) -> TrafficClass:
    kind = rng.choice(("interactive", "batch", "plain"))
    return TrafficClass(
        name=f"{kind}{index}",
        ttft_target_s=rng.choice((0.05, 0.5, 2.0)) if kind == "interactive" else None,
        tpot_target_s=rng.choice((0.02, 0.1)) if kind == "interactive" else None,
        e2e_target_s=rng.choice((1.0, 10.0)) if kind == "batch" else None,
        priority=rng.choice(list(Priority)),
        tenant=rng.choice(("", "a", "b")),
    )


def run(num_steps: int, first: int, *, seconds: float = float("inf")) -> tuple[int, int]:
    """Plays scenarios from `first` on until they have taken so many steps, or so long.

    Returns:
        (scenarios, steps) played.

    Raises:
        AssertionError, BrokenPlanError, RuntimeError: of the first that fails; its number was
            printed.
    """
    begun_s = time.monotonic()
    number, steps = first, 0
    while steps < num_steps and time.monotonic() - begun_s < seconds:
        scenario = draw_scenario(number)
        try:
            steps += play(scenario).num_steps
        except (Exception, BrokenPlanError):
            print(
                f"scenario {number} ({scenario.policy}) failed; again: "
                f"python -m octavo.engine.simulation.soak --scenario {number}",
                file=sys.stderr,
            )
            raise
        number += 1
    return number - first, steps


def main() -> int:
    """Soaks from the command line; 1 if anything failed."""
    import logging

    logging.getLogger("octavo.engine.faults.recovery").setLevel(logging.CRITICAL)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--first", type=int, default=0, help="number of the first scenario")
    parser.add_argument("--scenario", type=int, help="play this one alone")
    parser.add_argument("--keep-going", action="store_true", help="past failures")
    args = parser.parse_args()
    if args.scenario is not None:
        print(draw_scenario(args.scenario))
        print(play(draw_scenario(args.scenario)).num_steps, "steps")
        return 0
    steps, number, failures = 0, args.first, 0
    begun_s = time.monotonic()
    while steps < args.steps:
        try:
            _, played = run(1, number)
            steps += played
        except (Exception, BrokenPlanError):
            failures += 1
            traceback.print_exc(limit=-2)
            if not args.keep_going:
                return 1
        number += 1
    seconds = time.monotonic() - begun_s
    print(f"{number - args.first} scenarios, {steps:,} steps, {failures} failed, {seconds:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
