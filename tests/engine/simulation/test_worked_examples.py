"""Batching examples small enough to work out by hand, played by the real scheduler.

A step takes one second; step n runs from second n to n + 1. Steps do not overlap.
"""

from __future__ import annotations

import dataclasses
import math

import pytest

from octavo.engine.request import Request
from octavo.engine.scheduler.policies import get_policy
from octavo.engine.scheduler.policy import Policy, Snapshot
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.simulate import SimulationReport, simulate
from octavo.engine.simulation.step_time import ConstantStepTime
from octavo.engine.simulation.workloads.traffic import Arrival

PROMPT = 8
ARRIVALS = (0, 1, 1, 4, 5)
DECODE_STEPS = (4, 6, 3, 4, 3)


def limits(num_rows: int, budget: int = 4096) -> StepLimits:
    return StepLimits(
        max_num_batched_tokens=max(budget, num_rows),
        max_num_seqs=num_rows,
        max_num_steps=1,
        max_prefill_rows=num_rows,
        max_pages_per_seq=256,
        page_size=16,
        num_pages=1025,
        max_model_len=4096,
        token_edges=(budget,),
    )


def by_parts(name: str, num_tokens: int) -> Policy:
    """A policy whose prompts advance by so many tokens a step at most, each by itself."""

    def chunk(snapshot: Snapshot, request: Request, num_missing: int, budget: int) -> int:
        return min(num_missing, budget, num_tokens)

    return dataclasses.replace(get_policy(name), chunk=chunk, chunks_prompts=True)


def play(
    policy: Policy | str, arrivals: list[Arrival], num_rows: int, budget: int = 4096
) -> SimulationReport:
    scheduler = Scheduler(limits(num_rows, budget), policy=policy, enable_prefix_caching=False)
    return simulate(
        arrivals, scheduler, ConstantStepTime(1.0), overlap=False, max_tokens=1024,
        idle_tick_s=1.0, keep_timeline=True,
    )  # fmt: skip


def five_requests(last_leaves_s: float | None = None) -> list[Arrival]:
    """Two prefill steps each, which yield the first token, then a token each decode step."""
    return [
        Arrival(
            request_id=str(number),
            arrival_s=float(arrival),
            num_input=PROMPT,
            num_output=1 + steps,
            cancel_s=last_leaves_s if number == 5 else None,
        )
        for number, (arrival, steps) in enumerate(zip(ARRIVALS, DECODE_STEPS, strict=True), 1)
    ]


def last_steps(report: SimulationReport) -> dict[str, int]:
    """The step in which each request's last token was made."""
    return {
        record.request_id: round(record.last_token_s) - 1
        for record in report.records
        if record.last_token_s is not None
    }


def first_steps(report: SimulationReport) -> dict[str, int]:
    """The step in which each request began."""
    first: dict[str, int] = {}
    for step in report.timeline:
        for row in step.plan.prefill_rows:
            first.setdefault(row.request.request_id, round(step.begin_s))
    return first


def test_static_batching_waits_for_four_and_leaves_the_fifth() -> None:
    report = play(by_parts("static:batch_size=4", PROMPT // 2), five_requests(30.0), 4)
    assert [first_steps(report)[str(n)] for n in (1, 2, 3, 4)] == [4, 4, 4, 4]
    assert last_steps(report) == {"1": 9, "2": 11, "3": 8, "4": 9}
    assert "5" not in first_steps(report)
    assert report.records[-1].status == "cancelled"


def test_dynamic_batching_starts_at_its_timeout() -> None:
    report = play(by_parts("dynamic:batch_size=4,timeout_s=2", PROMPT // 2), five_requests(), 4)
    assert first_steps(report) == {"1": 2, "2": 2, "3": 2, "4": 10, "5": 10}
    assert last_steps(report) == {"1": 7, "2": 9, "3": 6, "4": 15, "5": 14}


def test_continuous_batching_ends_all_by_step_10() -> None:
    report = play(by_parts("fcfs", PROMPT // 2), five_requests(), 4)
    assert first_steps(report) == {"1": 0, "2": 1, "3": 1, "4": 4, "5": 6}
    assert last_steps(report) == {"1": 5, "2": 8, "3": 5, "4": 9, "5": 10}


def test_chunked_prefill_ends_the_first_second_and_fourth_one_step_sooner() -> None:
    # A step takes one prompt whole beside three decode rows; the third request's is cut in two.
    continuous = last_steps(play(by_parts("fcfs", PROMPT // 2), five_requests(), 4))
    chunked = last_steps(play("fcfs", five_requests(), 4, budget=PROMPT + 3))
    assert {n for n in chunked if chunked[n] == continuous[n] - 1} == {"1", "2", "4"}
    assert chunked["3"] == continuous["3"]
    assert chunked["5"] < continuous["5"]


@pytest.mark.parametrize(("policy", "iterations"), [("static", 70), ("fcfs", 45), ("orca", 45)])
def test_three_slots_take_70_iterations_static_and_45_continuous(
    policy: str, iterations: int
) -> None:
    arrivals = [
        Arrival(request_id=str(index), arrival_s=0.0, num_input=1, num_output=output)
        for index, output in enumerate((20, 40, 15, 30, 10))
    ]
    report = play(policy, arrivals, 3)
    assert report.num_steps == iterations
    assert report.duration_s == iterations


def test_static_batching_uses_half_of_its_slots() -> None:
    # Every position takes a step: slot use is Σ(prompt + output) over four times the longest.
    lengths = ((128, 500), (64, 50), (256, 200), (32, 30))
    arrivals = [
        Arrival(request_id=str(index), arrival_s=0.0, num_input=prompt, num_output=output)
        for index, (prompt, output) in enumerate(lengths)
    ]
    report = play(by_parts("static", 1), arrivals, 4)
    used = sum(step.plan.num_rows for step in report.timeline)
    longest = max(prompt + output for prompt, output in lengths) - 1
    assert report.num_steps == longest == 627
    assert used == sum(prompt + output - 1 for prompt, output in lengths)
    assert math.isclose(used / (4 * report.num_steps), 0.50, abs_tol=0.005)
