"""Figures: who was on time, and what is made of many requests."""

from __future__ import annotations

import pytest

from octavo.engine.simulation.metrics import (
    attainment,
    jain_index,
    merge_summaries,
    percentiles,
    summarize,
)
from octavo.engine.simulation.request_record import RequestRecord
from octavo.engine.simulation.workloads.traffic import PLAIN, TrafficClass

CHAT = TrafficClass(name="chat", ttft_target_s=1.0, tpot_target_s=0.1)
BATCH = TrafficClass(name="batch", e2e_target_s=10.0)


def record(traffic_class: TrafficClass = CHAT, **fields: object) -> RequestRecord:
    """Arrived at 2 s, first token at 2.5 s, 11 tokens in all by 3.5 s."""
    values = {
        "request_id": "a", "arrival_s": 2.0, "num_input": 5, "status": "stop", "num_output": 11,
        "first_token_s": 2.5, "last_token_s": 3.5, "finished_s": 3.5,
    }  # fmt: skip
    return RequestRecord(traffic_class=traffic_class, **{**values, **fields})  # type: ignore[arg-type]


def test_times_count_from_when_a_request_was_meant_to_be_sent() -> None:
    assert record().ttft_s == 0.5
    assert record().tpot_s == pytest.approx(0.1)
    assert record().e2e_s == 1.5


@pytest.mark.parametrize(
    ("fields", "on_time"),
    [
        ({"last_token_s": 3.4}, True),
        ({"last_token_s": 3.4, "first_token_s": 3.2, "arrival_s": 2.1}, False),
        ({"last_token_s": 3.6}, False),
        ({"num_output": 1, "last_token_s": 2.5}, True),
        ({"status": "rejected", "first_token_s": None, "last_token_s": None}, False),
        ({"last_token_s": 3.4, "status": "failed"}, False),
        ({"last_token_s": 3.4, "status": "length"}, True),
    ],
)
def test_on_time_is_both_targets_met_with_the_whole_answer(
    fields: dict[str, object], on_time: bool
) -> None:
    assert record(**fields).is_on_time is on_time


def test_batch_work_is_on_time_by_its_end() -> None:
    assert record(BATCH, first_token_s=11.0, last_token_s=11.9).is_on_time
    assert not record(BATCH, last_token_s=12.1).is_on_time
    assert record(PLAIN, last_token_s=1e6).is_on_time


def test_attainment_counts_refused_and_failed_but_not_clients_that_left() -> None:
    records = [
        record(last_token_s=3.4),
        record(status="rejected", first_token_s=None, last_token_s=None),
        record(status="failed"),
        record(status="cancelled"),
        record(last_token_s=3.4),
    ]
    assert attainment(records) == 0.5
    assert attainment([]) == 1.0


def test_jain_index_is_one_when_all_get_the_same() -> None:
    assert jain_index([3.0] * 7) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_a_summary_tells_classes_apart() -> None:
    refused = record(BATCH, status="rejected", first_token_s=None, last_token_s=None,
                     finished_s=2.25)  # fmt: skip
    summary = summarize([record(last_token_s=3.4), refused], [0.1, 0.2])
    assert summary["num_requests"] == 2
    assert summary["classes"]["chat"]["attainment"] == 1.0
    assert summary["classes"]["batch"]["attainment"] == 0.0
    assert summary["time_to_refuse_s"]["p50"] == 0.25
    assert summary["itl_s"]["p50"] == pytest.approx(0.15)
    assert summary["longest_wait_s"] == 0.5


def test_merged_summaries_hold_means_and_extremes() -> None:
    merged = merge_summaries(
        [
            {"a": 1, "worst_stall_s": 2.0, "ttft_s": {"p50": 1.0}, "x": None},
            {"a": 3, "worst_stall_s": 1.0, "ttft_s": None, "x": None},
        ]
    )
    assert merged == {"a": 2.0, "worst_stall_s": 2.0, "ttft_s": {"p50": 1.0}, "x": None}


def test_percentiles_of_nothing_are_none() -> None:
    assert percentiles([]) is None
    assert percentiles([1.0]) == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
