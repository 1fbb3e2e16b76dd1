"""Goodput: the highest rate at which enough of the offered requests are on time."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.metrics import merge_summaries
from octavo.engine.simulation.settings import Setting
from octavo.engine.simulation.simulate import SimulationReport, simulate, true_length

Attain = Callable[[float, int], float]
"""Attainment at a rate, by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A scheduler to be compared.

    Attributes:
        policy: its name, with parameters.
        token_budget: tokens a step, in place of the setting's.
        knows_lengths: whether clients declare true output lengths: for bounds, marked as such.
        scheduler_args: further arguments of `Scheduler`.
    """

    policy: str
    token_budget: int | None = None
    knows_lengths: bool = False
    scheduler_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What tables call it."""
        label = self.policy.replace(":lengths=declared", "")
        if self.token_budget is not None:
            label += f" ({self.token_budget} tokens)"
        return label + (" (lengths known)" if self.knows_lengths else "")


def run_once(
    setting: Setting, candidate: Candidate, rate: float, seed: int, **options: Any
) -> SimulationReport:
    """One run of a candidate in a setting.

    Steps do not overlap and the host costs nothing, as in the published comparisons, so that
    policies alone make the difference; the prefix cache is off, as no prompts are shared. A run
    ends when nobody left can be on time.

    Args:
        options: of `SimulationOptions`, over these.
    """
    limits = setting.limits
    if candidate.token_budget is not None:
        limits = dataclasses.replace(limits, max_num_batched_tokens=candidate.token_budget)
    arguments = {"enable_prefix_caching": False, **candidate.scheduler_args}
    scheduler = Scheduler(limits, policy=candidate.policy, **arguments)
    if candidate.knows_lengths:
        options.setdefault("declared_length", true_length)
    return simulate(
        setting.traffic(rate, seed),
        scheduler,
        setting.step_time,
        **{
            "overlap": False,
            "link": setting.link,
            "seed": seed,
            "max_tokens": setting.max_tokens,
            "stops_when_all_late": True,
            **options,
        },
    )


def highest_rate(
    attain: Callable[[float], float],
    threshold: float,
    *,
    low: float,
    high: float,
    tolerance: float = 0.02,
) -> float:
    """The highest rate whose attainment is at least `threshold`, by bisection.

    Attainment is taken to fall with the rate, which holds but for noise.

    Args:
        attain: attainment at a rate; called once a rate.
        threshold: 0 to 1.
        low, high: rates to search between; `low` is returned if even there too few are on time.
        tolerance: relative width at which to stop.
    """
    if attain(low) < threshold:
        return low
    if attain(high) >= threshold:
        return high
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        if attain(middle) >= threshold:
            low = middle
        else:
            high = middle
    return low


_T_975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's t with 0 (never), 1, 2, … degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with half the width of its 95% confidence interval."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From independent values, ≥ 1. One value alone has no interval: infinite."""
        n = len(values)
        mean = sum(values) / n
        if n == 1:
            return cls(mean, math.inf)
        variance = sum((value - mean) ** 2 for value in values) / (n - 1)
        t = _T_975[n - 1] if n <= len(_T_975) else 1.96 + 2.4 / (n - 1)
        return cls(mean, t * math.sqrt(variance / n))

    def to_dict(self) -> dict[str, float | None]:
        """For JSON, where infinity is null."""
        half = self.half_width if math.isfinite(self.half_width) else None
        return {"mean": self.mean, "ci95": half}

    def __str__(self) -> str:
        half = f" ± {self.half_width:.2f}" if math.isfinite(self.half_width) else ""
        return f"{self.mean:.2f}{half}"


class Attainments:
    """Attainment by rate and seed, each run once.

    Args:
        attain: runs it.
    """

    def __init__(self, attain: Attain) -> None:
        self._attain = attain
        self._known: dict[tuple[float, int], float] = {}

    def at(self, rate: float, seed: int) -> float:
        """Attainment at a rate, by seed."""
        key = (round(rate, 6), seed)
        if key not in self._known:
            self._known[key] = self._attain(*key)
        return self._known[key]

    def learn(self, rate: float, seed: int, attainment: float) -> None:
        """Takes in what was found otherwise."""
        self._known[round(rate, 6), seed] = attainment

    def goodput(
        self,
        threshold: float,
        seeds: Sequence[int],
        *,
        low: float,
        high: float,
        tolerance: float = 0.02,
    ) -> Estimate:
        """The highest rate with this attainment: one bisection a seed.

        It begins between the nearest of the rates that are known already.
        """
        found = []
        for seed in seeds:
            known = sorted(rate for rate, of_seed in self._known if of_seed == seed)
            missed = [rate for rate in known if self.at(rate, seed) < threshold]
            upper = min([high, *missed])
            lower = max([low, *(rate for rate in known if rate < upper)])
            found.append(
                highest_rate(
                    functools.partial(self.at, seed=seed), threshold,
                    low=lower, high=upper, tolerance=tolerance,
                )
            )  # fmt: skip
        return Estimate.of(found)


def measure_goodput(
    setting: Setting,
    candidate: Candidate,
    *,
    seeds: Sequence[int],
    rates: Sequence[float] | None = None,
    thresholds: Sequence[float] = (0.9, 0.99),
    tolerance: float = 0.02,
) -> dict[str, Any]:
    """A candidate's goodput, and how it fares at fixed rates. Fit for JSON.

    Args:
        setting: replica and traffic.
        candidate: who is measured.
        seeds: of the traffic, at least 3 for an honest interval.
        rates: at which every figure is given; None takes the setting's.
        thresholds: attainments to find the highest rate for.
        tolerance: of the bisection.
    """
    rates = setting.rates if rates is None else rates
    attainments = Attainments(
        lambda rate, seed: run_once(setting, candidate, rate, seed).attainment
    )
    summaries: dict[float, list[dict[str, Any]]] = {rate: [] for rate in rates}
    for rate in rates:
        for seed in seeds:
            summary = run_once(setting, candidate, rate, seed).summary()
            attainments.learn(rate, seed, summary["attainment"])
            summaries[rate].append(summary)
    low, high = min(rates) / 8, max(rates)

    def goodput(threshold: float) -> dict[str, Any]:
        found = attainments.goodput(threshold, seeds, low=low, high=high, tolerance=tolerance)
        return {**found.to_dict(), "at_least": found.mean >= high}

    return {
        "policy": candidate.policy,
        "label": candidate.label,
        "token_budget": candidate.token_budget,
        "knows_lengths": candidate.knows_lengths,
        "goodput": {f"{threshold:g}": goodput(threshold) for threshold in thresholds},
        "rates": [
            {
                **merge_summaries(summaries[rate]),
                "rate": rate,
                "attainment": Estimate.of([s["attainment"] for s in summaries[rate]]).to_dict(),
                "on_time_per_s": rate * sum(s["attainment"] for s in summaries[rate]) / len(seeds),
            }
            for rate in rates
        ],
    }


def tune_budget(
    setting: Setting,
    candidate: Candidate,
    budgets: Sequence[int],
    *,
    seed: int,
    threshold: float = 0.9,
) -> Candidate:
    """The candidate with the static token budget that serves it best on one seed.

    Args:
        seed: best another than those it is measured with.
    """

    def goodput(budget: int) -> float:
        tuned = dataclasses.replace(candidate, token_budget=budget)
        attainments = Attainments(
            lambda rate, seed: run_once(setting, tuned, rate, seed).attainment
        )
        low, high = min(setting.rates) / 8, max(setting.rates)
        found = attainments.goodput(threshold, [seed], low=low, high=high, tolerance=0.08)
        return found.mean

    return dataclasses.replace(candidate, token_budget=max(budgets, key=goodput))
