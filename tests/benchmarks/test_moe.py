"""The benchmark of routed experts measures what it says."""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.moe import SPREADS, choices, measured


def arguments() -> argparse.Namespace:
    return argparse.Namespace(
        experts=8, chosen=2, hidden=32, width=16, tokens=[6, 1], spread=list(SPREADS),
        way=["tiles", "ragged"], rows=[2], rounds=1, json=True,
    )  # fmt: skip


def test_every_spread_is_measured_in_every_way() -> None:
    rows = measured(arguments())
    assert [(row["tokens"], row["choices"]) for row in rows] == [
        (tokens, spread) for tokens in (6, 1) for spread in SPREADS
    ]
    for row in rows:
        assert row["experts in use"] * row["largest"] >= 2 * row["tokens"]
        for way in ("dense", "read", "tiles", "ragged", "tiles of 2"):
            assert row[f"{way} ms"] > 0


def test_choices_are_spread_as_they_say() -> None:
    rng, args = np.random.default_rng(0), arguments()
    used = {
        spread: np.bincount(choices(rng, args, 400, spread).reshape(-1), minlength=8)
        for spread in SPREADS
    }
    assert used["even"].min() > 60
    assert used["skewed"][0] > 2 * used["skewed"][4] > 0
    assert used["a quarter"][2:].sum() == 0
