"""The bound from work: small ones are what a person works out, and no run is above one."""

from __future__ import annotations

import pytest

from octavo.engine.simulation.executor import SwapLink
from octavo.engine.simulation.goodput import Candidate, run_once
from octavo.engine.simulation.settings import Setting, replica_limits
from octavo.engine.simulation.step_time import NIYAMA_STEP_TIME, ConstantStepTime
from octavo.engine.simulation.work_bound import work_bound
from octavo.engine.simulation.workloads.prompts import Segment
from octavo.engine.simulation.workloads.spec import Extent, generated_workload
from octavo.engine.simulation.workloads.traffic import PLAIN, Arrival, TrafficClass


def at_once(count: int, num_input: int, num_output: int, **targets: float) -> list[Arrival]:
    goals = TrafficClass(name="job", **targets)
    return [
        Arrival(request_id=str(n), arrival_s=0.0, num_input=num_input, num_output=num_output,
                traffic_class=goals)
        for n in range(count)
    ]  # fmt: skip


def test_prompts_take_a_share_of_a_full_step() -> None:
    """A step of 0.5 s computes one prompt; two are done before their second is over."""
    limits = replica_limits(kv_tokens=64_000, max_num_batched_tokens=1024)
    jobs = at_once(10, 1024, 1, ttft_target_s=1.0)
    assert work_bound(jobs, ConstantStepTime(0.5), limits) == pytest.approx(0.2)


def test_decoding_is_not_free() -> None:
    """A hundred iterations of 0.1 s with four rows: four answers in ten seconds."""
    limits = replica_limits(kv_tokens=64_000, num_rows=4)
    jobs = at_once(10, 1, 101, e2e_target_s=10.0)
    assert work_bound(jobs, ConstantStepTime(0.1), limits) == pytest.approx(0.4)
    paced = at_once(10, 1, 101, ttft_target_s=0.5, tpot_target_s=0.095)
    assert work_bound(paced, ConstantStepTime(0.1), limits) == pytest.approx(0.4)
    unhurried = at_once(10, 1, 101, e2e_target_s=100.0)
    assert work_bound(unhurried, ConstantStepTime(0.1), limits) == 1.0


def test_pages_are_held_while_rows_decode() -> None:
    """Ten seconds with a little over 100 of 200 pages each, as rows grow: one answer."""
    limits = replica_limits(kv_tokens=3200)
    jobs = at_once(10, 1600, 101, e2e_target_s=10.0)
    assert work_bound(jobs, ConstantStepTime(0.1), limits) == pytest.approx(0.1)
    assert work_bound(jobs, ConstantStepTime(0.1), replica_limits(kv_tokens=64_000)) == 1.0


def test_what_prompts_share_costs_nothing_where_prefixes_are_cached() -> None:
    limits = replica_limits(kv_tokens=64_000, max_num_batched_tokens=1024)
    jobs = [
        Arrival(request_id=str(n), arrival_s=0.0, num_input=1024, num_output=1,
                traffic_class=TrafficClass(name="job", ttft_target_s=1.0),
                segments=(Segment(7, 1024),))
        for n in range(10)
    ]  # fmt: skip
    assert work_bound(jobs, ConstantStepTime(0.5), limits, shares_prefixes=True) == 1.0
    assert work_bound(jobs, ConstantStepTime(0.5), limits) == pytest.approx(0.2)


def test_only_requests_with_targets_are_counted() -> None:
    limits = replica_limits(kv_tokens=64_000, max_num_batched_tokens=1024)
    plain = Arrival(
        request_id="x", arrival_s=0.0, num_input=1024, num_output=1, traffic_class=PLAIN
    )
    jobs = at_once(10, 1024, 1, ttft_target_s=1.0)
    assert work_bound([*jobs, plain], ConstantStepTime(0.5), limits) == pytest.approx(0.2)
    assert work_bound([plain], ConstantStepTime(0.5), limits) == 1.0


@pytest.mark.parametrize(
    ("spec", "rate", "kv_tokens", "binds"),
    [
        ("chat:input_len=1000:2000", 30.0, 64_000, True),
        ("tight-chat:output_len=200:200,tpot_s=0.005", 200.0, 64_000, True),
        ("reasoning:median=300,max_output_len=500,e2e_s=20", 30.0, 4_000, True),
        ("agents:shared_len=1024,output_len=10:50", 20.0, 64_000, False),
    ],
)
def test_no_run_is_above_the_bound(spec: str, rate: float, kv_tokens: int, binds: bool) -> None:
    workload = generated_workload([spec], Extent(num_requests=100))
    setting = Setting(
        name=spec, limits=replica_limits(kv_tokens=kv_tokens), step_time=NIYAMA_STEP_TIME,
        link=SwapLink(), traffic=workload.traffic, rates=(rate,), max_tokens=workload.max_output,
        enable_prefix_caching=spec.startswith("agents"),
    )  # fmt: skip
    bound = work_bound(
        setting.traffic(rate, 1), setting.step_time, setting.limits,
        max_tokens=setting.max_tokens, shares_prefixes=setting.enable_prefix_caching,
    )  # fmt: skip
    attained = [
        run_once(setting, candidate, rate, 1).attainment
        for candidate in (
            Candidate(policy="slo:lengths=declared", knows_lengths=True),
            Candidate(policy="edf-shed:begun=drop", token_budget=1024),
        )
    ]
    assert max(attained) <= bound
    assert (bound < 1.0) == binds
