"""Goodput: the highest rate at which enough of the offered requests are on time."""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.engine.scheduler.policies import get_policy
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.simulation.guarantees import class_shares, longest_wait
from octavo.engine.simulation.metrics import merge_summaries
from octavo.engine.simulation.rate_search import Attainments, Estimate
from octavo.engine.simulation.settings import Setting
from octavo.engine.simulation.simulate import SimulationReport, simulate, true_length

Submit = Callable[["Candidate", float, int], Future[dict[str, Any]]]
"""Begins a run somewhere."""

NOBODY = 0.05
"""Attainment below which higher rates are not tried."""

CLOSE = 0.02
"""Attainment by which a variant may come behind the best on one seed and yet be tried on others."""


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
    def key(self) -> tuple[Any, ...]:
        """What tells it from others."""
        return (self.policy, self.token_budget, self.knows_lengths, repr(self.scheduler_args))

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
    policies alone make the difference; the prefix cache is as the setting has it. A run ends when
    nobody left can be on time.

    Args:
        options: of `SimulationOptions`, over these.
    """
    limits = setting.limits
    if candidate.token_budget is not None:
        limits = dataclasses.replace(limits, max_num_batched_tokens=candidate.token_budget)
    arguments = {"enable_prefix_caching": setting.enable_prefix_caching, **candidate.scheduler_args}
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


def run_summary(setting: Setting, candidate: Candidate, rate: float, seed: int) -> dict[str, Any]:
    """Figures of one run, with whether it kept what the scheduler guarantees. Fit for JSON."""
    begun_s = time.process_time()
    max_wait_s = get_policy(candidate.policy).max_wait_s
    report = run_once(setting, candidate, rate, seed, keep_timeline=max_wait_s is not None)
    load = report.load
    tokens = sum(r.num_input + r.num_output for r in report.records if r.is_served)
    summary = {
        **report.summary(),
        "served_tokens_per_s": tokens / (report.duration_s or 1.0),
        "num_swaps": load.num_swaps,
        "num_recomputes": load.num_recomputes,
    }
    summary["run_s"] = time.process_time() - begun_s
    if max_wait_s is not None:
        summary["class_shares"] = class_shares(report, setting.limits.page_size)
        summary["longest_stretch"] = longest_wait(report, max_wait_s)
    return summary


class Runs:
    """Summaries of runs, each made once, by candidate, rate and seed.

    Args:
        setting: of all runs.
        submit: begins a run elsewhere, such as in another process; None makes it here, when its
            summary is asked for.
        path: a file that finished runs are kept in, so that a comparison that was broken off goes
            on where it stood. It says nothing of the code's state: another state, another file.

    Attributes:
        run_s: seconds that all runs took together, those read from the file included.
    """

    def __init__(
        self, setting: Setting, submit: Submit | None = None, path: Path | None = None
    ) -> None:
        self._setting = setting
        self._submit = submit
        self._path = path
        self._begun: dict[tuple[Any, ...], Future[dict[str, Any]]] = {}
        self._kept: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self.run_s = 0.0
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                kept = json.loads(line)
                self._kept[kept["run"]] = kept["summary"]

    def __len__(self) -> int:
        return len(self._begun)

    def start(self, candidate: Candidate, rate: float, seed: int) -> Future[dict[str, Any]]:
        """Begins a run unless it was begun before."""
        key = (*candidate.key, round(rate, 6), seed)
        with self._lock:
            future = self._begun.get(key)
            if future is None:
                name = f"{self._setting.name} {key}"
                if name in self._kept:
                    future = Future()
                    future.set_result(self._kept[name])
                elif self._submit is not None:
                    future = self._submit(candidate, key[-2], seed)
                else:
                    future = Future()
                self._begun[key] = future
                future.add_done_callback(functools.partial(self._keep, name))
        return future

    def _keep(self, name: str, future: Future[dict[str, Any]]) -> None:
        if future.cancelled() or future.exception() is not None:
            return
        summary = future.result()
        self.run_s += summary.get("run_s", 0.0)
        if self._path is not None and name not in self._kept:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"run": name, "summary": summary}) + "\n")

    def get(self, candidate: Candidate, rate: float, seed: int) -> dict[str, Any]:
        """The summary of a run, made now if it was not made before."""
        future = self.start(candidate, rate, seed)
        if self._submit is None and not future.done():
            future.set_result(run_summary(self._setting, candidate, round(rate, 6), seed))
        return future.result()


def measure_goodput(
    setting: Setting,
    candidate: Candidate,
    *,
    seeds: Sequence[int],
    rates: Sequence[float] | None = None,
    thresholds: Sequence[float] = (0.9, 0.99),
    tolerance: float = 0.02,
    runs: Runs | None = None,
) -> dict[str, Any]:
    """A candidate's goodput, and how it fares at fixed rates. Fit for JSON.

    Rates above one at which next to nobody is on time are left out: they cost the most and show
    nothing.

    Args:
        setting: replica and traffic.
        candidate: who is measured.
        seeds: of the traffic, at least 3 for an honest interval.
        rates: at which every figure is given; None takes the setting's.
        thresholds: attainments to find the highest rate for.
        tolerance: of the search.
        runs: where runs are made, and kept; None makes them here.
    """
    rates = sorted(setting.rates if rates is None else rates)
    runs = Runs(setting) if runs is None else runs
    attainments = Attainments(
        lambda rate, seed: float(runs.get(candidate, rate, seed)["attainment"])
    )
    rows: list[dict[str, Any]] = []
    for rate in rates:
        if rows and rows[-1]["attainment"]["mean"] < NOBODY:
            break
        for seed in seeds:
            runs.start(candidate, rate, seed)
        summaries = [runs.get(candidate, rate, seed) for seed in seeds]
        shares = [attainments.at(rate, seed) for seed in seeds]
        rows.append(
            {
                **merge_summaries(summaries),
                "rate": rate,
                "attainment": Estimate.of(shares).to_dict(),
                "on_time_per_s": rate * sum(shares) / len(seeds),
            }
        )
    low, high = min(rates) / 8, max(rates)

    def goodput(threshold: float) -> dict[str, Any]:
        found = attainments.goodput(threshold, seeds, low=low, high=high, tolerance=tolerance)
        return {
            **found.to_dict(),
            "at_least": found.mean >= high,
            "at_most": found.mean <= low,
        }

    return {
        "policy": candidate.policy,
        "label": candidate.label,
        "token_budget": candidate.token_budget,
        "knows_lengths": candidate.knows_lengths,
        "goodput": {f"{threshold:g}": goodput(threshold) for threshold in thresholds},
        "rates": rows,
    }


def tune(
    setting: Setting,
    variants: Sequence[Candidate],
    *,
    seeds: Sequence[int],
    rates: Sequence[float] | None = None,
    threshold: float = 0.9,
    runs: Runs | None = None,
) -> Candidate:
    """The variant with the most goodput by the rates that it will be compared at.

    From the lowest rate up, those go on that reach the threshold on the first seed. At the rate
    where none does any more, or where the rates end, those that came close to the best are tried on
    the other seeds as well, and the best in the mean is taken.

    Args:
        variants: the same policy with other parameters or token budgets, ≥ 1.
        seeds: best others than those it is measured with.
        rates, runs: as for `measure_goodput`.
    """
    runs, left = (Runs(setting) if runs is None else runs), list(variants)
    rates = sorted(setting.rates if rates is None else rates)
    attained: list[float] = []
    rate = rates[0]
    for rate in rates:
        if len(left) == 1:
            return left[0]
        attained = _attained(runs, left, rate, seeds[:1])
        reached = [c for c, share in zip(left, attained, strict=True) if share >= threshold]
        if not reached:
            break
        if rate < rates[-1]:
            left = reached
    best = max(attained)
    close = [c for c, share in zip(left, attained, strict=True) if share >= best - CLOSE]
    means = _attained(runs, close, rate, seeds)
    return close[means.index(max(means))]


def _attained(
    runs: Runs, candidates: Sequence[Candidate], rate: float, seeds: Sequence[int]
) -> list[float]:
    """Each candidate's attainment at a rate, in the mean over seeds."""
    for candidate in candidates:
        for seed in seeds:
            runs.start(candidate, rate, seed)
    return [
        sum(float(runs.get(candidate, rate, seed)["attainment"]) for seed in seeds) / len(seeds)
        for candidate in candidates
    ]
