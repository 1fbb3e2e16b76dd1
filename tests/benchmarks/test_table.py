"""The table of ratios, from results small enough to divide in one's head."""

from __future__ import annotations

import pytest


def result(rates: dict[str, float], single: float, outputs=None, times=None) -> dict:
    return {
        "start_to_first_token_s": 3.0,
        "prefill_tokens_per_s": 10 * single,
        "single_stream_tokens_per_s": single,
        "batches": {
            name: {
                "output_tokens_per_s": rate,
                "total_tokens_per_s": 3 * rate,
                "ttft_ms": times,
                "tpot_ms": times,
                "outputs": outputs or [[1, 2], [3, 4]],
            }
            for name, rate in rates.items()
        },
    }


@pytest.fixture
def table(peers_module):
    return peers_module("table")


@pytest.fixture
def runs():
    return {
        "Octavo": [result({"2": 60.0, "8": 120.0}, 20.0)],
        "Other": [result({"2": 30.0, "8": 60.0}, 40.0, times={"p50": 5.0, "p99": 9.0})],
        "Slow": [result({"2": 6.0}, 5.0, outputs=[[1, 2], [3, 9]])],
    }


def test_ratios_compare_equal_batches(table, runs) -> None:
    found = {
        (row["peer"], row["num_requests"]): row["output_tokens_per_s"]
        for row in table.ratios(runs, "Octavo")
    }
    assert found == {("Other", 2): 2.0, ("Other", 8): 2.0, ("Slow", 2): 10.0}


def test_ratios_of_streams_and_prefill_and_equal_outputs(table, runs) -> None:
    slow = table.ratios(runs, "Octavo")[-1]
    assert slow["single_stream_tokens_per_s"] == 4.0
    assert slow["prefill_tokens_per_s"] == 4.0
    assert slow["same_outputs"] == 0.5


def test_figures_are_medians_over_repeats(table) -> None:
    runs = {
        "Octavo": [result({"2": rate}, 20.0) for rate in (10.0, 90.0, 60.0)],
        "Other": [result({"2": rate}, 20.0) for rate in (30.0, 20.0, 1000.0)],
    }
    assert table.ratios(runs, "Octavo")[0]["output_tokens_per_s"] == 2.0


def test_without_the_baseline_there_are_rates_but_no_ratios(table, runs) -> None:
    del runs["Octavo"]
    assert {row["output_tokens_per_s"] for row in table.ratios(runs, "Octavo")} == {None}
    assert "| Other | 8 | 60.0 | – |" in table.table(runs, "Octavo")


def test_a_row_for_each_peer_and_batch_all_as_wide_as_the_header(table, runs) -> None:
    lines = table.table(runs, "Octavo").splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| Octavo", "8"],
        ["| Octavo", "2"],
        ["| Other", "8"],
        ["| Other", "2"],
        ["| Slow", "2"],
    ]
    assert {line.count("|") for line in lines} == {len(table.HEADER) + 1}
    assert "| Other | 8 | 60.0 | 2.00× | 180 | 40.0 | 0.50× | 400 | 0.50× | 5 / 9 |" in lines[4]
