"""Clients who are refused and come back when they are told to are served then."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.request_record import RequestRecord
from octavo.engine.simulation.settings import replica_limits
from octavo.engine.simulation.simulate import simulate
from octavo.engine.simulation.step_time import LinearCost
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

COST = LinearCost(
    base=0.02, token=0.0, prefill=5e-4, decode=1e-4, decode_context=0.0, prefill_context=0.0
)


class Machine:
    def seconds(self, work: Any) -> float:
        return COST.seconds(work) * work.num_steps


def serve(times_s: list[float], target_s: float, **options: Any) -> list[RequestRecord]:
    traffic_class = TrafficClass(name="", ttft_target_s=target_s)
    arrivals = [
        # About 0.1 s of the machine each: prompts are of a few lengths, as clients' are.
        Arrival(
            request_id=f"r{number}", arrival_s=time_s, num_input=120 + 20 * (number % 5),
            num_output=4, traffic_class=traffic_class,
        )
        for number, time_s in enumerate(times_s)
    ]  # fmt: skip
    scheduler = Scheduler(
        replica_limits(
            kv_tokens=65_536, num_rows=16, max_num_batched_tokens=256, max_model_len=2048
        )
    )
    # The forecast is sound before the load comes.
    warm = [
        Arrival(request_id=f"w{n}", arrival_s=0.5 * n, num_input=160, num_output=8)
        for n in range(20)
    ]
    report = simulate([*warm, *arrivals], scheduler, Machine(), num_returns=1, **options)
    return [record for record in report.records if record.request_id.startswith("r")]


def shares(records: list[RequestRecord]) -> tuple[int, float]:
    """How many clients came back, and the share of them that was served on time."""
    returned = [record for record in records if "~" in record.request_id]
    return len(returned), sum(r.is_on_time for r in returned) / max(1, len(returned))


def test_of_a_crowd_that_is_sent_away_four_in_five_are_served_when_they_return() -> None:
    records = serve([15.0 + 0.01 * number for number in range(100)], 1.0)
    num_returned, share = shares(records)
    assert num_returned > 50
    assert share >= 0.8


@pytest.mark.parametrize("load", [1.5, 3.0])
def test_under_a_load_that_lasts_too(load: float) -> None:
    gap_s = 0.1 / load
    records = serve([15.0 + gap_s * number for number in range(int(60.0 / gap_s))], 1.0)
    num_returned, share = shares(records)
    assert num_returned > 100
    assert share >= 0.8
    late = [r for r in records if r.status != "rejected" and not r.is_on_time]
    assert len(late) < 0.05 * len(records)
