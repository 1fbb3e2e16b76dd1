"""Workloads that share prefixes, as clients see them: judged by what is left to compute."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import pytest

from octavo.engine.scheduler.remaining_work import RemainingWork
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step_plan import StepLimits
from octavo.engine.simulation.simulate import simulate
from octavo.engine.simulation.soak import draw_scenario, play
from octavo.engine.simulation.step_time import LinearCost, TwoRegimeStepTime
from octavo.engine.simulation.workloads.prompts import Segment
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

LIMITS = StepLimits(
    max_num_batched_tokens=2048,
    max_num_seqs=64,
    max_num_steps=1,
    max_prefill_rows=16,
    max_pages_per_seq=4096,
    page_size=16,
    num_pages=32_768,
    max_model_len=65_536,
    token_edges=(64, 256, 512, 1024, 2048),
)
_COST = LinearCost(
    base=0.01, token=1e-4, prefill=0.0, decode=1e-4, decode_context=1e-8, prefill_context=0.0
)
STEP_TIME = TwoRegimeStepTime(_COST, _COST, edge=4096)
"""10 ms a step and 0.1 ms a token: a prompt of 8,192 tokens takes 0.86 s."""


def play_with(policy, arrivals, **changes):
    return simulate(arrivals, Scheduler(LIMITS, policy=policy), STEP_TIME, **changes)


def system_prompt(rate=4.0, num_requests=135):
    """8,192 shared and 256 own tokens, the first due in 0.3 to 0.7 s."""
    rng, now_s, arrivals = random.Random(1), 0.0, []
    for index in range(num_requests):
        now_s += rng.expovariate(rate)
        kind = TrafficClass(name="c", ttft_target_s=rng.uniform(0.3, 0.7), tpot_target_s=0.1)
        arrivals.append(
            Arrival(
                request_id=str(index),
                arrival_s=now_s,
                num_input=8448,
                num_output=16,
                traffic_class=kind,
                segments=(Segment(1, 8192),),
            )
        )
    return arrivals


@pytest.mark.parametrize("policy", ["fcfs", "slo", "auto", "edf-shed", "fcfs-shed", "niyama"])
def test_a_shared_system_prompt_is_no_reason_to_refuse(policy):
    report = play_with(policy, system_prompt())
    assert report.attainment >= 0.98
    assert report.num_prefill_tokens == 8192 + 135 * 256


def conversations(num_users=12, num_turns=6, seed=3):
    """Turns of conversations that grow from 4k to 28k tokens, the first token due in 1 s."""
    rng, arrivals = random.Random(seed), []
    kind = TrafficClass(name="chat", ttft_target_s=1.0, tpot_target_s=0.2)
    for user in range(num_users):
        begins_s = 40.0 * rng.random()
        for turn in range(num_turns):
            num_input = 4096 + turn * 4800 + rng.randint(0, 64)
            arrivals.append(
                Arrival(
                    request_id=f"{user}.{turn}",
                    arrival_s=begins_s + turn * 40.0,
                    num_input=num_input,
                    num_output=64,
                    traffic_class=kind,
                    segments=(Segment(user, num_input // 256 * 256),),
                )
            )
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


@pytest.mark.parametrize("policy", ["slo", "auto", "edf-shed"])
def test_long_conversations_are_judged_by_their_new_turn(policy):
    """A turn of 28,000 tokens takes 2.9 s, its last 4,800 half a second."""
    arrivals = conversations()
    report = play_with(policy, arrivals)
    baseline = play_with("fcfs", arrivals)
    assert report.attainment >= baseline.attainment - 0.01
    assert report.attainment >= 0.98


@pytest.mark.parametrize("policy", ["slo", "auto", "edf-shed"])
def test_a_burst_of_equal_prompts_is_judged_by_what_it_computes_together(policy):
    """Twelve prompts of 8,448 tokens take 10 s apart and 1.2 s together."""
    kind = TrafficClass(name="c", ttft_target_s=2.0, tpot_target_s=0.5)
    arrivals = [
        dataclasses.replace(arrival, arrival_s=1.0, traffic_class=kind)
        for arrival in system_prompt(num_requests=12)
    ]
    # Steps to learn from first: nobody is given up before that.
    first = [
        Arrival(request_id=f"first{n}", arrival_s=0.05 * n, num_input=64, num_output=2)
        for n in range(12)
    ]
    report = play_with(policy, [*first, *arrivals])
    assert all(record.status == "stop" for record in report.records)
    assert report.attainment == 1.0
    assert report.num_prefill_tokens == 12 * 64 + 8192 + 12 * 256


def decisions(scenario):
    """A digest of every plan of a soak's scenario."""
    digest = hashlib.blake2b()
    options = {**scenario.options, "keep_timeline": True}
    report = play(dataclasses.replace(scenario, options=options))
    for step in report.timeline:
        plan = step.plan
        rows = [(r.request.request_id, r.slot, r.start, r.max_new_tokens) for r in plan.decode_rows]
        rows += [
            (r.request.request_id, r.slot, r.start, r.num_tokens, *r.page_ids)
            for r in plan.prefill_rows
        ]
        digest.update(repr((step.begin_s, rows, plan.preempted, plan.page_updates)).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("policy", ["fcfs", "slo", "edf", "mlfq", "dynamic"])
def test_without_the_prefix_cache_no_decision_depends_on_what_prompts_share(policy, monkeypatch):
    """But for the pages that the host keeps of a swapped request."""
    scenarios = [
        dataclasses.replace(
            scenario,
            policy=policy,
            limits=dataclasses.replace(scenario.limits, num_host_pages=0),
            scheduler_args={
                **scenario.scheduler_args,
                "policy": policy,
                "enable_prefix_caching": False,
            },
        )
        for scenario in map(draw_scenario, range(6))
    ]
    with_estimates = [decisions(scenario) for scenario in scenarios]
    for name in ("enter", "leave", "forget", "advance", "measure_changed", "changed"):
        monkeypatch.setattr(RemainingWork, name, lambda *args: None)
    monkeypatch.setattr(RemainingWork, "seat", lambda *args: None)
    monkeypatch.setattr(RemainingWork, "num_reusable", lambda *args: 0)
    assert [decisions(scenario) for scenario in scenarios] == with_estimates
