"""Workloads as they are asked for: specs read to parameters, traces at any rate and length."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.workloads.arrivals import ArrivalProcess, parse_process
from octavo.engine.simulation.workloads.generators import Agents, Reasoning, Retrieval, Sessions
from octavo.engine.simulation.workloads.prompts import block_segments
from octavo.engine.simulation.workloads.spec import (
    Extent,
    drawn_workload,
    generated_workload,
    trace_file_workload,
)
from octavo.engine.simulation.workloads.traffic import TrafficClass, with_targets

FEW = Extent(num_requests=40)


def trace(folder: Path, num_rows: int = 200, gap_s: float = 0.5, text: str = "") -> Path:
    path = folder / "trace.csv"
    rows = "\n".join(f"{gap_s * n},{50 + n},{5 + n % 7}" for n in range(num_rows))
    path.write_text(text or f"arrival_s,input_tokens,output_tokens\n{rows}\n")
    return path


def table(folder: Path, num_rows: int = 50) -> Path:
    path = folder / "lengths.csv"
    rows = "\n".join(f"{10 + n},{n + 1}" for n in range(num_rows))
    path.write_text(f"input_tokens,output_tokens\n{rows}\n")
    return path


@pytest.mark.parametrize(
    ("spec", "source"),
    [
        ("sessions", Sessions()),
        (
            "sessions:turns=3:5,think_s=2.5,new_len=64",
            Sessions(turns=(3, 5), think_s=2.5, new_len=(64, 64)),
        ),
        ("agents:shared_len=100,tenant=a", Agents(shared_len=100, tenant="a")),
        ("retrieval:zipf=0,ttft_s=9", Retrieval(zipf=0.0, ttft_s=9.0)),
        ("reasoning:tpot_s=none,batch_share=1", Reasoning(tpot_s=None, batch_share=1.0)),
    ],
)  # fmt: skip
def test_a_spec_is_a_generator_with_parameters(spec: str, source: Sessions) -> None:
    workload = generated_workload([spec], FEW)
    assert workload.traffic(2.0, 1) == source.arrivals(2.0, 1, num_requests=40)
    assert workload.max_model_len == source.max_input + source.max_output


def test_several_specs_are_mixed_by_their_shares() -> None:
    workload = generated_workload(
        ["chat:share=3", "tight_chat"], Extent(duration_s=1000.0), process=ArrivalProcess(0.5)
    )
    names = [a.traffic_class.name for a in workload.traffic(4.0, 1)]
    assert names.count("chat") / len(names) == pytest.approx(0.75, abs=0.03)


def test_a_mix_is_all_kinds_or_those_that_it_names() -> None:
    arrivals = generated_workload(["mix"], Extent(num_requests=1000)).traffic(5.0, 1)
    names = {a.traffic_class.name for a in arrivals}
    assert names == {
        "tight-chat", "sessions", "agents", "retrieval", "reasoning", "batch", "flood", "calm",
        "bursts",
    }  # fmt: skip
    two = generated_workload(["mix:agents=1,tight_chat=4"], Extent(num_requests=1000))
    names = [a.traffic_class.name for a in two.traffic(5.0, 1)]
    assert names.count("agents") / 1000 == pytest.approx(0.2, abs=0.04)
    assert set(names) == {"agents", "tight-chat"}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ("nobody", "workload"), ("chat:speed=1", "workload"), ("chat:cv", "workload"),
        ("chat:cv=1,cv=2", "workload"), ("mix:nobody=1", "workload"), ("mix:chat=0", "chat"),
        ("chat:share=-1", "share"), ("chat:share=nan", "share"), ("chat:cv=high", "cv"),
        ("agents:shared_len=1.5", "shared_len"), ("chat:input_len=9:8", "input_len"),
        ("chat:ttft_s=0", "ttft_s"), ("chat:tpot_s=nan", "tpot_s"), ("chat:ttft_s=1e6", "ttft_s"),
        ("agents:shared_len=none", "shared_len"),
    ],
)  # fmt: skip
def test_a_bad_spec_is_refused_by_name(spec: str, field: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        generated_workload([spec], FEW)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "process"),
    [
        ("poisson", ArrivalProcess(1.0)),
        ("gamma:cv=4", ArrivalProcess(4.0)),
        ("recorded", None),
    ],
)
def test_a_process_is_read(text: str, process: ArrivalProcess | None) -> None:
    assert parse_process(text) == process


@pytest.mark.parametrize(
    "text",
    ["", "gamma", "gamma:cv=", "gamma:cv=0", "gamma:cv=nan", "gamma:shape=2", "poisson:cv=1"],
)
def test_a_bad_process_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="arrivals = "):
        parse_process(text)


def test_a_recorded_trace_is_whole_at_its_own_rate(tmp_path: Path) -> None:
    workload = trace_file_workload(trace(tmp_path))
    assert workload.rate == pytest.approx(200 / 99.5)
    arrivals = workload.traffic(workload.rate, 1)
    assert [(a.arrival_s, a.num_input) for a in arrivals] == [(0.5 * n, 50 + n) for n in range(200)]
    assert workload.max_model_len == max(a.num_input + a.num_output for a in arrivals)
    assert workload.max_output == 11


@pytest.mark.parametrize("rate", [0.5, 1.5, 2.0, 5.0, 7.3])
def test_a_recorded_trace_changes_its_rate_and_never_its_clock(tmp_path: Path, rate: float) -> None:
    arrivals = trace_file_workload(trace(tmp_path, 2000)).traffic(rate, 1)
    # Thinned by chance: four deviations of a count, at most.
    assert abs(len(arrivals) - 1000 * rate) < 4 * (1000 * rate) ** 0.5
    # Every copy keeps the trace's steps of half a second.
    copies = max(1, int(np.ceil(rate / 2 - 1e-9)))
    steps = {round(a.arrival_s * 2 * copies, 6) % 1 for a in arrivals}
    assert max(min(step, 1 - step) for step in steps) < 0.01


def test_copies_share_prefixes_within_and_not_between(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(
        f'{{"timestamp": {n * 1000}, "input_length": 600, "output_length": 2, '
        f'"hash_ids": [1, {n + 2}]}}\n'
        for n in range(100)
    ))  # fmt: skip
    arrivals = trace_file_workload(path).traffic(3 * 100 / 99, 1)
    first = {a.segments[0].stream for a in arrivals}
    assert len(arrivals) == 300
    assert len(first) == 3
    assert block_segments((1,), 512, 512)[0].stream in first


def test_a_number_of_requests_is_a_stretch_at_a_place_drawn_by_seed(tmp_path: Path) -> None:
    workload = trace_file_workload(trace(tmp_path), FEW)
    arrivals = workload.traffic(workload.rate, 1)
    lengths = [a.num_input for a in arrivals]
    assert lengths == list(range(lengths[0], lengths[0] + 40))
    assert arrivals[0].arrival_s == 0.0
    assert len({workload.traffic(workload.rate, seed)[0].num_input for seed in range(8)}) > 3
    with pytest.raises(InvalidConfigError, match="num_requests = 300"):
        trace_file_workload(trace(tmp_path), Extent(num_requests=300)).traffic(workload.rate, 1)


def test_a_window_and_a_duration_cut_a_trace(tmp_path: Path) -> None:
    workload = trace_file_workload(trace(tmp_path), Extent(duration_s=5.0), between_s=(10.0, 40.0))
    arrivals = workload.traffic(workload.rate, 1)
    assert [a.num_input for a in arrivals] == list(range(70, 80))
    with pytest.raises(InvalidConfigError, match="in the window"):
        trace_file_workload(trace(tmp_path), between_s=(500.0, 600.0))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_lengths_arrive_by_any_process(tmp_path: Path, cv: float) -> None:
    process = "poisson" if cv == 1 else f"gamma:cv={cv}"
    workload = trace_file_workload(table(tmp_path), Extent(num_requests=5000), arrivals=process)
    arrivals = workload.traffic(4.0, 1)
    waits = np.diff([a.arrival_s for a in arrivals])
    assert 1 / waits.mean() == pytest.approx(4.0, rel=0.06 * max(1.0, cv))
    assert waits.std() / waits.mean() == pytest.approx(cv, rel=0.12)
    assert len({a.request_id for a in arrivals}) == 5000
    assert arrivals == workload.traffic(4.0, 1)
    assert arrivals != workload.traffic(4.0, 2)


def test_rows_of_a_table_come_equally_often_and_arrive_at_random_by_default(tmp_path: Path) -> None:
    workload = trace_file_workload(table(tmp_path), Extent(num_requests=500))
    arrivals = workload.traffic(1.0, 1)
    counts = np.bincount([a.num_input for a in arrivals])[10:]
    assert set(counts.tolist()) == {10}
    assert [a.num_input for a in arrivals[:50]] != sorted(a.num_input for a in arrivals[:50])
    default = trace_file_workload(table(tmp_path)).traffic(2.0, 1)
    assert 290 < default[-1].arrival_s < 300


def test_a_trace_with_times_may_arrive_by_a_process_in_its_order(tmp_path: Path) -> None:
    workload = trace_file_workload(trace(tmp_path), FEW, arrivals="poisson")
    lengths = [a.num_input for a in workload.traffic(9.0, 1)]
    assert [(b - a) % 200 for a, b in itertools.pairwise(lengths)] == [1] * 39


def test_a_table_has_no_recorded_arrivals(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="arrivals = 'recorded'"):
        trace_file_workload(table(tmp_path), arrivals="recorded")


@pytest.mark.parametrize("burstiness", [0.0625, 1.0, 4.0])
def test_drawn_requests_end_at_their_number(burstiness: float) -> None:
    ranges = (4, 9), (1, 5)
    for seed in range(20):
        workload = drawn_workload(*ranges, FEW, burstiness=burstiness)
        assert len(workload.traffic(3.0, seed)) == 40
    whole = drawn_workload(*ranges, Extent(duration_s=200.0), burstiness=burstiness)
    assert workload.traffic(3.0, 19) == whole.traffic(3.0, 19)[:40]


@pytest.mark.parametrize(
    ("field", "extent"),
    [
        ("num_requests", {"num_requests": 0}),
        ("duration", {"duration_s": 0.0}),
        ("duration", {"duration_s": float("nan")}),
        ("duration", {"duration_s": float("inf")}),
    ],
)
def test_an_extent_that_cannot_be_is_refused(field: str, extent: dict) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        Extent(**extent)
    assert caught.value.field == field


def test_other_targets_leave_what_only_has_to_be_done_in_time() -> None:
    arrivals = Reasoning().arrivals(1.0, 1, num_requests=100)
    changed = with_targets(arrivals, ttft_s=2.0)
    classes = {a.traffic_class.name: a.traffic_class for a in changed}
    assert classes["reasoning"].ttft_target_s == 2.0
    assert classes["reasoning"].tpot_target_s == 0.06
    assert classes["batch"].ttft_target_s is None
    plain = drawn_workload((4, 9), (1, 5), FEW).traffic(1.0, 1)
    assert {a.traffic_class.tpot_target_s for a in with_targets(plain, tpot_s=0.1)} == {0.1}
    assert with_targets(plain) == plain


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 86_400.1])
def test_a_target_that_cannot_be_is_refused_by_name(value: float) -> None:
    for field in ("ttft_target_s", "tpot_target_s", "e2e_target_s"):
        with pytest.raises(InvalidConfigError, match=f"{field} = "):
            TrafficClass(name="x", **{field: value})
    with pytest.raises(InvalidConfigError, match="ttft = "):
        with_targets([], ttft_s=value)
    assert TrafficClass(name="x", e2e_target_s=86_400.0).e2e_target_s == 86_400.0
