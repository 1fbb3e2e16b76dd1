"""What the matrix says: cells with paired intervals, and where one falls short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.goodput_matrix.runs import QUARTILES
from octavo.engine.simulation.rate_search import Estimate

OURS = "slo"
"""The policy that is held to the rules."""

MARGIN = 0.005
"""Attainment by which it may come behind a rival in a cell."""

GAIN = 0.04
"""What it must be ahead of each cell's best rival, in the mean of cells at loads ≥ 1."""

GROUP_MARGIN = 0.05
"""Attainment by which a quartile or tenant may come behind the best rival's."""

FEWEST = 40
"""Requests of a group, all seeds together, below which it is not judged."""


def judge_cell(
    workload: str, load: float, found: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any]:
    """One cell. Fit for JSON.

    Args:
        workload, load: of the cell.
        found: policy -> figures by seed, the same seeds in the same order for each, so that
            differences are between runs of the same requests. `OURS` and ≥ 1 rival.

    Returns:
        Means by policy, the best rival, each rival's difference with its interval, groups, and
        `shortfalls`: sentences that say what falls short.
    """
    ours = _attainments(found[OURS])
    rivals = [name for name in found if name != OURS]
    means = {name: _mean(_attainments(figures)) for name, figures in found.items()}
    best = max(rivals, key=lambda name: means[name])
    shortfalls = []
    differences: dict[str, Any] = {}
    for name in rivals:
        pairs = zip(ours, _attainments(found[name]), strict=True)
        difference = Estimate.of([mine - theirs for mine, theirs in pairs])
        differences[name] = difference.to_dict()
        if not _is_level(difference):
            shortfalls.append(f"{-difference.mean:.3f} behind {name}")
    groups: dict[str, dict[str, Any]] = {}
    for kind in ("quartiles", "tenants"):
        groups[kind] = judged = _groups(found[OURS], found[best], kind)
        for name, (mine, theirs) in judged.items():
            if mine < theirs - GROUP_MARGIN:
                what = f"tenant {name}" if kind == "tenants" else f"{name} prompts"
                shortfalls.append(f"{what} {theirs - mine:.3f} behind {best}")
    return {
        "workload": workload,
        "load": load,
        "num_requests": [figures["num_requests"] for figures in found[OURS]],
        "attainment": means,
        "best_rival": best,
        "ahead": differences[best],
        "differences": differences,
        "groups": groups,
        "shortfalls": shortfalls,
    }


def judge_all(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everything that falls short, a sentence each; empty if nothing does."""
    found = [
        f"{cell['workload']} at {cell['load']:g}: {text}"
        for cell in cells
        for text in cell["shortfalls"]
    ]
    gain = mean_gain(cells)
    if gain is not None and gain < GAIN:
        found.append(f"{gain:.3f} ahead of the best rivals at loads of 1 and more; {GAIN:g} wanted")
    return found


def mean_gain(cells: Sequence[Mapping[str, Any]]) -> float | None:
    """How far it is ahead of each cell's best rival, over cells at loads ≥ 1; None of none."""
    ahead = [cell["ahead"]["mean"] for cell in cells if cell["load"] >= 1]
    return _mean(ahead) if ahead else None


def mean_by_load(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each load, as `plot_loads` takes it: means over the workloads run at that load.

    Policies that were not run in every cell of a load are left out.
    """
    rows = []
    for load in sorted({cell["load"] for cell in cells}):
        alike = [cell for cell in cells if cell["load"] == load]
        names = [n for n in alike[0]["attainment"] if all(n in c["attainment"] for c in alike)]
        rows.append({
            "load": load,
            "attainment": {n: _mean([c["attainment"][n] for c in alike]) for n in names},
            "bound": _mean([cell["bound"] for cell in alike]),
        })  # fmt: skip
    return rows


def table(cells: Sequence[Mapping[str, Any]], bounds: Mapping[tuple[str, float], float]) -> str:
    """The matrix in Markdown, a row a cell, with the paired 95% interval of the last difference."""
    policies = list(dict.fromkeys(name for cell in cells for name in cell["attainment"]))
    head = ["workload", "load", *policies, "bound", "ahead of the best rival", "falls short"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cell in cells:
        shown = [
            f"**{share:.3f}**" if name == cell["best_rival"] else f"{share:.3f}"
            for name in policies
            for share in [cell["attainment"].get(name, float("nan"))]
        ]
        half = cell["ahead"]["ci95"]
        ahead = f"{cell['ahead']['mean']:+.3f}" + ("" if half is None else f" ± {half:.3f}")
        bound = bounds.get((cell["workload"], cell["load"]))
        row = [
            cell["workload"], f"{cell['load']:g}", *shown, "" if bound is None else f"{bound:.3f}",
            ahead, "; ".join(cell["shortfalls"]),
        ]  # fmt: skip
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _is_level(difference: Estimate) -> bool:
    """Whether a difference is no shortfall: small, or zero is within its interval.

    One seed alone has no interval, and excuses nothing.
    """
    if difference.mean >= -MARGIN:
        return True
    return difference.half_width < 1 and difference.mean + difference.half_width >= 0


def _groups(
    ours: Sequence[Mapping[str, Any]], best: Sequence[Mapping[str, Any]], kind: str
) -> dict[str, tuple[float, float]]:
    """Group -> (ours, the best rival's) attainment of its requests, all seeds together."""
    judged = {}
    names = {name for figures in ours for name in figures[kind]}
    for name in sorted(
        names, key=lambda name: (QUARTILES.index(name) if name in QUARTILES else 0, name)
    ):
        mine, theirs = _pooled(ours, kind, name), _pooled(best, kind, name)
        if mine[0] >= FEWEST:
            judged[name] = (mine[1], theirs[1])
    return judged


def _pooled(figures: Sequence[Mapping[str, Any]], kind: str, name: str) -> tuple[int, float]:
    counts = [found[kind][name] for found in figures if name in found[kind]]
    total = sum(count for count, _ in counts)
    return int(total), sum(count * share for count, share in counts) / total


def _attainments(figures: Sequence[Mapping[str, Any]]) -> list[float]:
    return [found["attainment"] for found in figures]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
