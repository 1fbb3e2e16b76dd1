"""Python's collector looks at everything while that is little, and in no flood."""

from __future__ import annotations

import gc

import pytest

from octavo.engine.process import collector
from octavo.engine.process.collector import Collector


@pytest.fixture(autouse=True)
def _as_before():
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


def looks_at_everything(tidy) -> int:
    seen = []
    gc.callbacks.append(lambda phase, info: seen.append((phase, info["generation"])))
    try:
        tidy()
    finally:
        gc.callbacks.pop()
    return seen.count(("start", 2))


def test_what_has_come_to_stay_is_looked_at_in_a_calm_moment():
    tidying = Collector()
    kept = [[] for _ in range(25_000)]  # more than a round of the middle generation
    assert looks_at_everything(tidying.tidy) == 1
    assert looks_at_everything(tidying.tidy) == 0, "nothing has come since"
    assert len(kept) == 25_000


def test_in_a_flood_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr(collector, "FEW_BLOCKS", 10_000)
    tidying = Collector()
    kept = [[] for _ in range(30_000)]
    assert looks_at_everything(tidying.tidy) == 0
    kept.clear()
    assert looks_at_everything(tidying.tidy) == 1
