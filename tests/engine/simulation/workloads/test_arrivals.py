"""Arrivals: processes with the rate they promise, loads changed without touching bursts."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.engine.simulation.settings import (
    BATCH,
    CHAT,
    azure_setting,
    get_setting,
    memory_bound_setting,
    token_edges,
)
from octavo.engine.simulation.workloads.arrivals import (
    gamma_arrivals,
    spread_classes,
    superpose,
    thin,
    trace_traffic,
    uniform_lengths,
    window,
)
from octavo.engine.simulation.workloads.traces import read_arrivals
from octavo.engine.simulation.workloads.traffic import Arrival, prompt_tokens

LENGTHS = uniform_lengths((1, 100), (1, 50))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_arrivals_have_the_rate_and_burstiness_asked_for(burstiness: float) -> None:
    arrivals = gamma_arrivals(5.0, 4000.0, LENGTHS, seed=1, burstiness=burstiness)
    waits = np.diff([arrival.arrival_s for arrival in arrivals])
    assert len(arrivals) / 4000 == pytest.approx(5.0, rel=0.05)
    assert waits.std() / waits.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_thinning_keeps_at_a_larger_share_whoever_it_kept_at_a_smaller() -> None:
    arrivals = gamma_arrivals(5.0, 400.0, LENGTHS, seed=1)
    few, many = thin(arrivals, 0.3, seed=2), thin(arrivals, 0.6, seed=2)
    assert {a.request_id for a in few} < {a.request_id for a in many}
    assert len(few) / len(arrivals) == pytest.approx(0.3, abs=0.05)
    assert thin(arrivals, 1.0, seed=2) == arrivals


def test_a_window_starts_its_own_clock() -> None:
    arrivals = gamma_arrivals(5.0, 100.0, LENGTHS, seed=1)
    inside = window(arrivals, 20.0, 40.0)
    assert len(inside) == sum(20 <= a.arrival_s < 40 for a in arrivals)
    assert 0 <= inside[0].arrival_s < 1


def test_superposed_streams_are_one_in_order_of_arrival() -> None:
    streams = [gamma_arrivals(2.0, 50.0, LENGTHS, seed=s, prefix=f"{s}-") for s in range(3)]
    merged = superpose(*streams)
    times = [a.arrival_s for a in merged]
    assert times == sorted(times)
    assert len(merged) == sum(map(len, streams))


def test_a_trace_is_superposed_with_itself_above_its_own_rate() -> None:
    trace = gamma_arrivals(2.0, 500.0, LENGTHS, seed=1)
    traffic = trace_traffic(trace)
    for rate in (0.5, 1.9, 5.0):
        arrivals = traffic(rate, 1)
        assert len({a.request_id for a in arrivals}) == len(arrivals)
        assert len(arrivals) / 500 == pytest.approx(rate, rel=0.15)


def test_a_share_of_the_arrivals_changes_class() -> None:
    arrivals = gamma_arrivals(5.0, 400.0, LENGTHS, seed=1, traffic_class=CHAT)
    spread = spread_classes(arrivals, 0.2, BATCH, seed=3)
    share = sum(a.traffic_class is BATCH for a in spread) / len(spread)
    assert share == pytest.approx(0.2, abs=0.04)


def test_bad_rates_are_refused_by_name() -> None:
    with pytest.raises(InvalidConfigError, match="rate = 0"):
        gamma_arrivals(0, 10.0, LENGTHS, seed=1)
    with pytest.raises(InvalidConfigError, match="share = 2"):
        thin([], 2, seed=1)


def write_azure(folder: Path) -> Path:
    rng = random.Random(1)
    for name, gap_s in (("conv", 1.0), ("code", 2.0)):
        now_s, lines = 0.0, ["arrival_s,input_tokens,output_tokens"]
        while now_s < 2200:
            lines.append(f"{now_s:.3f},{rng.randint(10, 3000)},{rng.randint(1, 300)}")
            now_s += rng.expovariate(1 / gap_s)
        (folder / f"azure_2023_{name}.csv").write_text("\n".join(lines))
    return folder


def test_the_azure_setting_has_its_classes_at_any_rate(tmp_path: Path) -> None:
    setting = azure_setting(write_azure(tmp_path))
    for rate in (0.5, 1.5, 2.5):
        arrivals = setting.traffic(rate, 1)
        assert len(arrivals) / 400 == pytest.approx(rate, rel=0.15)
        names = [a.traffic_class.name for a in arrivals]
        chats = names.count("chat") + names.count("batch")
        assert names.count("batch") / chats == pytest.approx(0.2, abs=0.08)
        assert names.count("code") > 0
    assert setting.limits.num_pages == 4001
    assert setting.traffic(1.5, 1) == setting.traffic(1.5, 1)
    assert setting.traffic(1.5, 1) != setting.traffic(1.5, 2)


def test_the_memory_bound_setting_has_long_outputs_and_a_host_tier(tmp_path: Path) -> None:
    setting = memory_bound_setting(write_azure(tmp_path))
    long = [a.num_output for a in setting.traffic(1.0, 1) if a.traffic_class.name == "reasoning"]
    assert 1000 < np.median(long) < 2200
    assert setting.limits.num_pages == 1001
    assert setting.limits.num_host_pages == 4000
    most = max(a.num_input + a.num_output for a in setting.traffic(1.0, 1))
    assert most <= setting.limits.max_model_len


def test_an_unknown_setting_or_a_missing_folder_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="setting"):
        get_setting("nowhere", ".")
    with pytest.raises(InvalidConfigError, match="trace_dir"):
        get_setting("azure", None)


def test_token_edges_are_fine_and_end_at_the_budget() -> None:
    edges = token_edges(3000)
    assert edges[-1] == 3000
    assert list(edges) == sorted(set(edges))
    assert all(later - edge <= max(64, edge / 4) for edge, later in itertools.pairwise(edges))


def test_mooncake_lines_share_prefixes_by_block(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 500, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 7]}\n'
        '{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}\n'
    )
    first, second = read_arrivals(path)
    assert (first.arrival_s, second.arrival_s) == (0.0, 0.5)
    a, b = prompt_tokens(first, 0), prompt_tokens(second, 1)
    assert (len(a), len(b)) == (700, 1100)
    assert a == b[:700]
    assert prompt_tokens(first, 0) != prompt_tokens(Arrival(
        request_id="x", arrival_s=0.0, num_input=700, num_output=1), 0)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "input_tokens,output_tokens\n1,2\n"),
        ("a.csv", "arrival_s,input_tokens,output_tokens\n0,zero,2\n"),
        ("a.jsonl", '{"timestamp": 0, "input_length": 0, "output_length": 1}\n'),
        ("a.jsonl", "no json\n"),
    ],
)
def test_bad_trace_files_are_refused_by_name(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidConfigError, match="trace = "):
        read_arrivals(tmp_path / name)
