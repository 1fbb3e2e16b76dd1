"""A slice of `make hostile`: hostile clients beside a sane one, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_MS = 2000.0
"""Test processes share few cores, and any of them may wait for hundreds of milliseconds. What this
slice is for stood still for seconds, or for ever; `make hostile` holds the real bound."""


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.hostile import run

    return run


def test_hostile_clients_harm_nobody(hostile) -> None:
    cases = [case for case in hostile.all_cases() if case.short]
    assert len(cases) >= 5
    rows, wrong = hostile.run(cases, tiny=True, rounds=1, most_ms=MOST_MS)
    assert wrong == []
    assert [(row.name, row.faults) for row in rows if row.faults] == []
    assert len(rows) == 1 + 2 * len(cases)  # the first is without attackers


def test_names_are_told_apart(hostile) -> None:
    names = [case.name for case in hostile.all_cases()]
    assert len(set(names)) == len(names)
