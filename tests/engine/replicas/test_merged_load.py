"""The load of several replicas as that of one engine."""

from __future__ import annotations

import dataclasses

import pytest

from octavo.engine.observability.load import EngineLoad
from octavo.engine.replicas.merged_load import merge_loads
from octavo.engine.replicas.messages import PROBE_TOKENS, LoadReport
from octavo.engine.request import Priority
from octavo.engine.scheduler.load import QueueLoad


def report(ttft_s=(0.1, 1.1), **changes) -> LoadReport:
    numbers = {
        field.name: 0
        for field in dataclasses.fields(EngineLoad)
        if field.default is dataclasses.MISSING and field.name != "queues"
    }
    known = {"num_total_pages": 100, "num_free_pages": 100, "queues": {}, "steps_by_tokens": ()}
    load = EngineLoad(**{**numbers, **known, **changes})
    return LoadReport(load, dict.fromkeys(Priority, ttft_s))


def test_one_replica_is_as_it_is() -> None:
    alone = report(num_free_pages=25, kv_cache_usage=0.75, kv_waste=0.1, num_running=3)
    merged = merge_loads([alone], 1, Priority.NORMAL)
    assert merged == dataclasses.replace(
        alone.load, predicted_ttft_s=0.1, padding_waste=merged.padding_waste
    )


def test_counts_add_up_and_shares_are_of_the_whole() -> None:
    reports = [
        report(
            num_running=2, num_free_pages=50, kv_waste=0.5, num_steps=10, host_s_per_step=0.01,
            num_step_tokens=90, num_step_slots=100, device_busy_s=9.0, device_idle_s=1.0,
            steps_by_tokens=(0, 10),
        ),
        report(
            num_running=3, num_free_pages=100, kv_waste=0.0, num_steps=30, host_s_per_step=0.03,
            num_step_tokens=110, num_step_slots=300, device_busy_s=30.0, device_idle_s=0.0,
            steps_by_tokens=(1, 2, 27),
        ),
    ]  # fmt: skip
    merged = merge_loads(reports, 1, Priority.LOW)
    assert merged.num_running == 5
    assert (merged.num_free_pages, merged.num_total_pages) == (150, 200)
    assert merged.kv_cache_usage == pytest.approx(0.25)
    assert merged.kv_waste == pytest.approx(0.5)  # all owned pages are the first one's
    assert merged.padding_waste == pytest.approx(0.5)
    assert merged.host_s_per_step == pytest.approx(0.025)
    assert merged.device_idle_share == pytest.approx(1 / 40)
    assert merged.steps_by_tokens == (1, 12, 27)


def test_queues_of_a_class_are_one() -> None:
    def queue(*numbers: float) -> QueueLoad:
        return QueueLoad(
            num_waiting=int(numbers[0]), oldest_s=numbers[1], num_prompt_tokens=int(numbers[2])
        )

    high, low = Priority.HIGH, Priority.LOW
    merged = merge_loads(
        [
            report(queues={high: queue(1, 0.5, 9)}),
            report(queues={high: queue(2, 0.1, 1), low: queue(4, 3, 2)}),
        ],
        1,
        Priority.NORMAL,
    )  # fmt: skip
    assert merged.queues == {high: queue(3, 0.5, 10), low: queue(4, 3, 2)}


@pytest.mark.parametrize(
    ("num_tokens", "seconds"),
    [(1, 0.1), (PROBE_TOKENS, 0.7), ((PROBE_TOKENS + 1) // 2, pytest.approx(0.4, rel=0.01))],
)
def test_the_first_token_is_the_soonest_replicas(num_tokens, seconds) -> None:
    reports = [report(ttft_s=(0.1, 1.1)), report(ttft_s=(0.4, 0.7)), report(ttft_s=(0.1, 0.7))]
    assert merge_loads(reports, num_tokens, Priority.NORMAL).predicted_ttft_s == seconds
