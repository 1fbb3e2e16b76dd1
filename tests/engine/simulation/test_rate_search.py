"""The highest rate is found with few runs, and never far from one that was run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from octavo.engine.simulation.rate_search import Attainments, Estimate, highest_rate


def power(edge: float, exponent: float = 2.0) -> Callable[[float], float]:
    """A tenth misses at the edge."""
    return lambda rate: max(0.0, 1.0 - 0.1 * (rate / edge) ** exponent)


def cliff(edge: float) -> Callable[[float], float]:
    return lambda rate: 1.0 if rate <= edge else 0.5


@pytest.mark.parametrize("exponent", [0.7, 2.0, 6.0])
@pytest.mark.parametrize("edge", [0.5, 3.3, 11.0])
def test_the_edge_is_found_with_few_runs(edge: float, exponent: float) -> None:
    asked: list[float] = []

    def attain(rate: float) -> float:
        asked.append(rate)
        return power(edge, exponent)(rate)

    found = highest_rate(attain, 0.9, low=0.1, high=20.0, tolerance=0.02)
    assert found == pytest.approx(edge, rel=0.03)
    assert min(abs(math.log(found / rate)) for rate in asked) <= 0.02
    assert len(asked) == len(set(asked)) <= 12


def test_a_cliff_is_found_between_two_rates_that_were_run() -> None:
    asked: list[float] = []

    def attain(rate: float) -> float:
        asked.append(rate)
        return cliff(3.3)(rate)

    found = highest_rate(attain, 0.9, low=0.1, high=20.0, tolerance=0.01)
    below, above = max(r for r in asked if r <= 3.3), min(r for r in asked if r > 3.3)
    assert below <= found <= above
    assert above / below < 1.1


def test_the_search_stays_within_its_ends() -> None:
    assert highest_rate(cliff(0.01), 0.9, low=0.1, high=20.0) == 0.1
    assert highest_rate(cliff(99.0), 0.9, low=0.1, high=20.0) == 20.0
    never = Attainments(lambda rate, seed: 0.5)
    assert never.goodput(0.9, [1], low=0.1, high=20.0).mean == 0.1
    assert never.goodput(0.99, [1], low=0.1, high=20.0).mean == 0.1


def test_every_rate_and_seed_is_run_once_and_known_rates_narrow_the_search() -> None:
    asked: list[tuple[float, int]] = []

    def attain(rate: float, seed: int) -> float:
        asked.append((rate, seed))
        return power(3.0)(rate)

    attainments = Attainments(attain)
    for rate in (2.0, 4.0):
        attainments.learn(rate, 1, power(3.0)(rate))
    estimate = attainments.goodput(0.9, [1], low=0.1, high=20.0)
    attainments.goodput(0.85, [1], low=0.1, high=20.0)
    assert estimate.mean == pytest.approx(3.0, rel=0.01)
    assert 1 <= len(asked) == len(set(asked)) <= 4
    assert all(2.0 < rate < 4.0 for rate, _ in asked)


def test_an_estimate_has_students_interval() -> None:
    estimate = Estimate.of([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    assert estimate.half_width == pytest.approx(4.303 / math.sqrt(3))
    assert Estimate.of([5.0]).to_dict() == {"mean": 5.0, "ci95": None}
