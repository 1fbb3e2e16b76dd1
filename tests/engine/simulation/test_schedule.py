"""Pictures of schedules say what happened: they are held to what the simulation knows."""

from __future__ import annotations

import io
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.observability.event_log import EventLines
from octavo.engine.observability.perfetto import perfetto_trace
from octavo.engine.observability.schedule import Schedule, ScheduleReader, read_schedule
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.faults import Faults
from octavo.engine.simulation.settings import NIYAMA_STEP_TIME, SwapLink, replica_limits
from octavo.engine.simulation.simulate import SimulationReport, simulate
from octavo.engine.simulation.workloads.arrivals import gamma_arrivals, uniform_lengths
from octavo.engine.simulation.workloads.traffic import Arrival, TrafficClass

CHAT = TrafficClass(name="chat", ttft_target_s=1.0, tpot_target_s=0.05)
TROUBLE = Faults(slow_step_share=0.1, cancelled_share=0.1, failed_step_share=0.01)


def played(
    arrivals: list[Arrival], policy: str = "slo", faults: Faults = TROUBLE, **limits: Any
) -> tuple[SimulationReport, Schedule]:
    """A run, and its schedule as an observer reads it."""
    reader = ScheduleReader()
    sizes = {"kv_tokens": 1024, "num_rows": 8, "max_num_batched_tokens": 128} | limits
    scheduler = Scheduler(
        replica_limits(**sizes, max_model_len=512), policy=policy, explain=True,
        num_decode_steps=sizes.get("max_num_steps", 1),
    )  # fmt: skip
    report = simulate(
        arrivals, scheduler, NIYAMA_STEP_TIME, faults=faults, observer=EventLines(reader.read),
        link=SwapLink(), max_tokens=64, keep_timeline=True,
    )  # fmt: skip
    return report, reader.schedule


@given(
    policy=st.sampled_from(["static", "fcfs", "mlfq", "edf-shed", "slo", "auto"]),
    num_steps=st.sampled_from([1, 4]),
    host_kv_tokens=st.sampled_from([0, 2048]),
    seed=st.integers(1, 5),
)
@settings(max_examples=10)
def test_a_schedule_is_what_happened(
    policy: str, num_steps: int, host_kv_tokens: int, seed: int
) -> None:
    lengths = uniform_lengths((4, 300), (1, 60))
    arrivals = gamma_arrivals(6.0, 3.0, lengths, seed=seed, traffic_class=CHAT)
    report, schedule = played(
        arrivals, policy, max_num_steps=num_steps, host_kv_tokens=host_kv_tokens
    )
    steps = schedule.steps
    assert len(steps) > 20
    for before, after in itertools.pairwise(steps):
        assert before.end_s <= after.begin_s <= after.end_s, "one step at a time"
        assert before.step_id < after.step_id
    emitted: dict[str, int] = defaultdict(int)
    for step in steps:
        assert len({cell.slot for cell in step.cells}) == len(step.cells), "a row holds one request"
        for cell in step.cells:
            assert cell.num_tokens > 0
            if cell.kind == "decode":
                emitted[cell.request_id] += cell.num_tokens
    lost = [mark.request_id for mark in schedule.marks if mark.kind == "lost"]
    for record in report.records:
        # The last chunk of a prompt emits a token, and so does that of what is computed again.
        num_prefills = 1 + record.num_preemptions + lost.count(record.request_id)
        assert record.num_output - num_prefills <= emitted[record.request_id]
        if record.status != "cancelled":  # whose tokens on their way are dropped
            assert emitted[record.request_id] <= record.num_output
    kinds = defaultdict(set)
    for mark in schedule.marks:
        kinds[mark.request_id].add(mark.kind)
    for record in report.records:
        told = kinds[record.request_id] & {
            "refused",
            "rejected",
            "stop",
            "length",
            "cancelled",
            "failed",
        }
        allowed = {"refused", "rejected"} if record.status == "rejected" else {record.status}
        assert len(told) == 1, (record, told)
        assert told <= allowed, (record, told)
    preempted = sum(record.num_preemptions for record in report.records)
    assert sum(mark.kind == "preempted" for mark in schedule.marks) == preempted


def test_waits_and_rows_of_a_request_never_overlap(chats: Callable[..., list[Arrival]]) -> None:
    _, schedule = played(chats(8.0, 5.0), faults=Faults())
    begins = {}
    for wait in schedule.waits:
        assert wait.begin_s <= wait.end_s
        begins.setdefault(wait.request_id, wait)
    assert len(begins) > 20
    for step in schedule.steps:
        for cell in step.cells:
            assert step.end_s >= begins[cell.request_id].end_s


def test_slack_is_counted_from_targets() -> None:
    def line(**values: Any) -> dict[str, Any]:
        return values

    def commit(step: int, t: float) -> dict[str, Any]:
        return line(t=t, commit=step, rows=[[7]], duration_s=0.1)

    add = {"request_id": "a", "arrival_s": 10.0, "ttft_target_s": 0.5, "tpot_target_s": 0.2}
    lines = [
        line(t=10.0, add=add),
        line(t=10.1, turn={"step": 0, "num_steps": 1, "decode": [],
                           "prefill": [["a", 3, 0, 5, True, True, []]]}),
        commit(0, 10.2),
        line(t=10.2, turn={"step": 1, "num_steps": 1, "decode": [["a", 3, 5, 1]], "prefill": []},
             why=[["a", "chunked", "the rest of its prompt", "b", 3, 0.0]]),
        commit(1, 10.3),
        line(t=10.3, turn={"step": 2, "num_steps": 1, "decode": [["a", 3, 6, 1]], "prefill": []}),
        commit(2, 10.7),
    ]  # fmt: skip
    schedule = read_schedule(lines)
    slacks = [step.cells[0].slack_s for step in schedule.steps]
    # The first token was due at 10.5; the second 0.2 s after the first came, the third 0.4.
    assert slacks == pytest.approx([0.3, 0.1, -0.1])
    assert schedule.steps[1].cells[0].reason == "chunked: the rest of its prompt, for b"
    assert [wait.end_s for wait in schedule.waits] == [10.1]
    assert read_schedule(lines[1:]).steps[0].cells[0].slack_s is None, "a log may begin anywhere"
    assert len(read_schedule(lines[2:]).steps) == 2
    assert [step.step_id for step in schedule.since(10.3).steps] == [1, 2]


def test_a_log_and_an_observer_give_one_schedule(chats: Callable[..., list[Arrival]]) -> None:
    log, reader = io.StringIO(), ScheduleReader()
    limits = replica_limits(kv_tokens=1024, num_rows=8, max_num_batched_tokens=128)
    simulate(
        chats(), Scheduler(limits, policy="slo", explain=True), NIYAMA_STEP_TIME, faults=TROUBLE,
        log=log, observer=EventLines(reader.read),
    )  # fmt: skip
    lines = map(json.loads, log.getvalue().splitlines()[1:])
    assert read_schedule(lines) == reader.schedule
    assert any(cell.reason for step in reader.schedule.steps for cell in step.cells)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_slices_of_a_trace_nest(chats: Callable[..., list[Arrival]], num_replicas: int) -> None:
    schedules = [played(chats(6.0, 4.0, seed))[1] for seed in range(num_replicas)]
    trace = json.loads(json.dumps(perfetto_trace(schedules)))
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    open_waits: set[tuple[int, str]] = set()
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            continue
        assert event["ts"] >= 0
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "b":
            open_waits.add((event["pid"], event["id"]))
        elif event["ph"] == "e":
            open_waits.remove((event["pid"], event["id"]))
    assert not open_waits
    assert len({process for process, _ in tracks}) == 2 * num_replicas
    for slices in tracks.values():
        enclosing: list[float] = []
        for begin, end in sorted(slices, key=lambda item: (item[0], -item[1])):
            while enclosing and enclosing[-1] <= begin + 0.01:  # µs; times are rounded
                enclosing.pop()
            assert not enclosing or end <= enclosing[-1] + 0.01
            enclosing.append(end)
    assert sum(event["ph"] == "X" for event in trace["traceEvents"]) > 100


def test_nothing_makes_an_empty_trace() -> None:
    events = perfetto_trace([Schedule()])["traceEvents"]
    assert all(event["ph"] == "M" for event in events)
