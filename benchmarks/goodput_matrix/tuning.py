"""Each rival at its best: the capacity of a workload, and what serves most at each load."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.goodput_matrix.runs import Run, RunStore
from benchmarks.goodput_matrix.workloads import Case
from octavo.engine.simulation.rate_search import highest_rate

LOADS = (0.6, 1.0, 1.5, 2.5)
"""Rates at which policies are compared, in capacities."""

THRESHOLD = 0.9
"""Attainment that the best rival still has at capacity."""

TUNING_SEEDS = (1_001, 1_002)
"""Of traffic that nothing is measured with."""

BUDGETS = (192, 256, 352, 512, 1024, 4096)
"""Static token budgets: steps of 192 tokens take some 30 ms, of 352 some 50 ms."""

TOLERANCE = 0.04
"""Relative distance of the capacity from a rate that was run."""


class Variant(NamedTuple):
    """A rival with parameters.

    Attributes:
        policy: name with parameters.
        token_budget: tokens of a step; None for the replica's.
    """

    policy: str
    token_budget: int | None = None

    def run(self, case: Case, rate: float, seed: int) -> Run:
        """A run of it."""
        return Run(
            case=case, policy=self.policy, token_budget=self.token_budget, rate=rate, seed=seed
        )


def _with_budgets(*policies: str) -> tuple[Variant, ...]:
    return tuple(Variant(*pair) for pair in itertools.product(policies, BUDGETS))


def _niyama() -> tuple[Variant, ...]:
    """`alpha` by either reading of the paper's decode term; floors at the default `alpha`."""
    by_alpha = [
        f"niyama:alpha={alpha:g},decode={decode}"
        for alpha in (0, 0.5, 1, 2, 8)
        for decode in ("work", "due")
    ]
    by_floor = [f"niyama:alpha={alpha:g},floor={floor}" for alpha in (1, 8) for floor in (16, 256)]
    return tuple(Variant(policy) for policy in (*by_alpha, *by_floor))


RIVALS: dict[str, tuple[Variant, ...]] = {
    "fcfs": _with_budgets("fcfs"),
    "fcfs-shed": _with_budgets("fcfs-shed", "fcfs-shed:begun=drop"),
    "edf": _with_budgets("edf"),
    "edf-shed": _with_budgets("edf-shed", "edf-shed:begun=drop"),
    "least-slack": _with_budgets("least-slack"),
    "niyama": _niyama(),
    "sjf": _with_budgets("sjf"),
    "priority": _with_budgets("priority"),
}
"""What each rival is tuned over."""

PROBES = (
    Variant("fcfs", 512),
    Variant("edf", 1024),
    Variant("fcfs-shed:begun=drop", 512),
    Variant("edf-shed:begun=drop", 512),
    Variant("niyama"),
)
"""Whose capacity says where all variants are tried, to find whose capacity counts."""

NUM_STRONGEST = 3
"""Variants that the capacity is searched with."""

Attain = Callable[[Sequence[Variant], int], list[float]]
"""Attainment of each variant in a rung of the halving."""


def halve(
    variants: Sequence[Variant], attain: Attain, *, num_rungs: int, num_left: int = 1
) -> list[Variant]:
    """The best variants, found with most of the runs spent on the better ones.

    Each rung but the last keeps a quarter, at least two; the last sorts what is left. Of variants
    that are level the earlier one comes first.

    Args:
        variants: ≥ 1.
        attain: attainments in a rung, 0 first; later ones are longer runs of other seeds.
        num_rungs: ≥ 1.
        num_left: how many are returned, best first.

    Source: successive halving, Jamieson and Talwalkar 2016, with quarters in place of halves.
    """
    left = list(variants)
    for rung in range(num_rungs):
        if len(left) <= num_left and rung:
            break
        shares = attain(left, rung)
        order = sorted(range(len(left)), key=lambda index: -shares[index])
        count = num_left if rung == num_rungs - 1 else max(2, num_left, math.ceil(len(left) / 4))
        left = [left[index] for index in order[:count]]
    return left


def find_capacity(attain: Callable[[float], float], guess: float) -> float:
    """The rate at which `attain` first falls below `THRESHOLD`.

    Args:
        attain: the best rival's attainment at a rate.
        guess: requests a second to begin with; the search spans 8 times more and less.
    """
    known: dict[float, float] = {}

    def once(rate: float) -> float:
        if rate not in known:
            known[rate] = attain(rate)
        return known[rate]

    # Doubled until it fails: at rates far beyond the capacity, runs say nothing.
    high = guess
    while once(high) >= THRESHOLD and high < 8 * guess:
        high *= 2
    low = high / 2
    while low not in known and once(low) < THRESHOLD and low > guess / 8:
        high, low = low, low / 2
    return highest_rate(
        once, THRESHOLD, low=low, high=high, attained_low=known.get(low), tolerance=TOLERANCE
    )


def tune_case(
    case: Case,
    store: RunStore,
    *,
    loads: Iterable[float],
    policies: Iterable[str],
) -> dict[str, Any]:
    """A workload's capacity, and the best variant of each rival at each load. Fit for JSON.

    A quarter of the requests decides which quarter of the variants goes on, to whole runs of
    another seed.
    """
    shares = (0.25, 1.0)

    def attain_at(rate: float) -> Attain:
        def attain(variants: Sequence[Variant], rung: int) -> list[float]:
            part = replace(case, num_requests=max(20, round(shares[rung] * case.num_requests)))
            seed = TUNING_SEEDS[rung % len(TUNING_SEEDS)]
            found = store.get(variant.run(part, rate, seed) for variant in variants)
            return [figures["attainment"] for figures in found]

        return attain

    def capacity_of(variants: Sequence[Variant], guess: float, seeds: Sequence[int]) -> float:
        def best_attainment(rate: float) -> float:
            found = store.get(v.run(case, rate, seed) for v in variants for seed in seeds)
            each = np.array([figures["attainment"] for figures in found])
            return float(each.reshape(len(variants), len(seeds)).mean(axis=1).max())

        return find_capacity(best_attainment, guess)

    probed = capacity_of(PROBES, case.guess, TUNING_SEEDS[:1])
    everyone = [variant for variants in RIVALS.values() for variant in variants]
    strongest = halve(everyone, attain_at(probed), num_rungs=1, num_left=NUM_STRONGEST)
    capacity = capacity_of(strongest, probed, TUNING_SEEDS)
    tuned: dict[str, Any] = {}
    for load in loads:
        attain = attain_at(load * capacity)
        best = {name: halve(RIVALS[name], attain, num_rungs=len(shares))[0] for name in policies}
        tuned[f"{load:g}"] = {name: variant._asdict() for name, variant in best.items()}
    return {"capacity": capacity, "num_requests": case.num_requests, "loads": tuned}
