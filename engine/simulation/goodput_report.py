"""How a goodput bench shows what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def goodput_table(
    results: Sequence[Mapping[str, Any]], bounds: Mapping[float, float] | None = None
) -> str:
    """A comparison as a Markdown table.

    Args:
        results: of `measure_goodput`, all at the same rates.
        bounds: attainment that nobody can exceed, by rate.
    """
    if not results:
        return ""
    rates = sorted({row["rate"] for result in results for row in result["rates"]})
    thresholds = list(results[0]["goodput"])
    head = [
        "policy",
        *(f"rate at {float(t):.0%}" for t in thresholds),
        *(f"{r:g}/s" for r in rates),
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        cells = [result["label"]]
        cells += [_estimate(result["goodput"][t], 2) for t in thresholds]
        attained = {row["rate"]: _estimate(row["attainment"], 3) for row in result["rates"]}
        cells += [attained.get(rate, "-") for rate in rates]
        lines.append("| " + " | ".join(cells) + " |")
    if bounds:
        cells = ["no scheduler exceeds", *("" for _ in thresholds)]
        cells += [f"{bounds[rate]:.3f}" for rate in rates]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def detail_table(results: Sequence[Mapping[str, Any]], rate: float) -> str:
    """Latencies and costs at one rate, as a Markdown table; times in milliseconds."""
    head = (
        "policy", "TTFT p50/p99", "TPOT p50/p99", "ITL p99", "e2e p99 s", "worst stall s",
        "refused", "refused in p50", "swaps", "recomputes", "recomputed", "swapped pages", "Jain",
        "longest wait s",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        row = _row_at(result, rate)
        if row is None:
            continue
        cells = [
            result["label"], _pair(row["ttft_s"]), _pair(row["tpot_s"]),
            _ms(row["itl_s"], "p99"),
            f"{row['e2e_s']['p99']:.1f}" if row["e2e_s"] else "-",
            f"{row['worst_stall_s']:.2f}",
            f"{row['num_refused'] / max(1, row['num_requests']):.1%}",
            _ms(row["time_to_refuse_s"], "p50"),
            f"{row.get('num_swaps', 0):.0f}",
            f"{row.get('num_recomputes', row['num_preemptions']):.0f}",
            f"{row['recompute_share']:.1%}",
            f"{row['swapped_pages_out']:.0f}", f"{row['jain_index']:.2f}",
            f"{row['longest_wait_s']:.1f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def class_table(results: Sequence[Mapping[str, Any]], rate: float) -> str:
    """Attainment by class at one rate, as a Markdown table."""
    rows = {result["label"]: _row_at(result, rate) for result in results}
    shown = {label: row["classes"] for label, row in rows.items() if row is not None}
    names = sorted({name for classes in shown.values() for name in classes})
    lines = [f"| policy | {' | '.join(name or 'all' for name in names)} |"]
    lines.append("|" + "---|" * (1 + len(names)))
    for label, classes in shown.items():
        cells = [f"{classes[n]['attainment']:.3f}" if n in classes else "-" for n in names]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def guarantee_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Classes' shares and longest waits against what is guaranteed, as a Markdown table.

    Only policies that guarantee anything are in it; empty if none does.
    """
    lines = [
        "| policy | rate | class: share of the last prompt tokens while it waits (guaranteed; most "
        "tokens short of it), of pages | longest stretch waited s | pinned after s "
        "| overtaken when over it | kept |",
        "|" + "---|" * 7,
    ]
    for result in results:
        for row in result["rates"]:
            if "longest_stretch" not in row:
                continue
            wait = row["longest_stretch"]
            shares = [
                f"{name} {_share(found['tokens'])} ({found['guaranteed']:.0%}; "
                f"{found['lacked_tokens']:.0f}), {_share(found['pages'])}"
                for name, found in row["class_shares"].items()
            ]
            lines.append(
                f"| {result['label']} | {row['rate']:g} | {'; '.join(shares)} "
                f"| {wait['longest_s']:.1f} | {wait['max_wait_s']:g} | {wait['num_overtaken']:.0f} "
                f"| {'yes' if keeps_guarantees(row) else '**no**'} |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def keeps_guarantees(row: Mapping[str, Any]) -> bool:
    """Whether, at a rate, every class got its share and nobody was overtaken past the bound."""
    kept = [found["is_kept"] for found in row.get("class_shares", {}).values()]
    return all(kept) and row.get("longest_stretch", {"is_kept": True})["is_kept"]


def ratio_lines(results: Sequence[Mapping[str, Any]]) -> str:
    """How many times the goodput of each other policy `slo` has, a line a threshold."""
    found = {result["policy"]: result["goodput"] for result in results}
    if "slo" not in found:
        return ""
    lines = []
    for threshold, goodput in found["slo"].items():
        others = [
            f"{goodput['mean'] / result['goodput'][threshold]['mean']:.2f} x {result['label']}"
            for result in results
            if result["policy"] != "slo" and not result["knows_lengths"]
        ]
        lines.append(f"At {float(threshold):.0%}, slo serves {', '.join(others)}.")
    return "\n\n".join(lines)


def bound_line(results: Sequence[Mapping[str, Any]], bounds: Mapping[float, float]) -> str:
    """How much of what no scheduler exceeds `slo` attains, by rate; empty if it is not there."""
    for result in results:
        if result["policy"] == "slo":
            shares = [
                f"{row['attainment']['mean'] / bounds[row['rate']]:.3f} at {row['rate']:g}/s"
                for row in result["rates"]
            ]
            return f"Of what no scheduler exceeds, slo attains {', '.join(shares)}."
    return ""


def _row_at(result: Mapping[str, Any], rate: float) -> Mapping[str, Any] | None:
    return next((row for row in result["rates"] if row["rate"] == rate), None)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _estimate(value: Mapping[str, Any], digits: int) -> str:
    half = value["ci95"]
    sign = "≥ " * bool(value.get("at_least")) + "≤ " * bool(value.get("at_most"))
    text = sign + f"{value['mean']:.{digits}f}"
    return text if half is None else f"{text} ± {half:.{digits}f}"


def _pair(values: Mapping[str, float] | None) -> str:
    return "-" if values is None else f"{1e3 * values['p50']:.0f} / {1e3 * values['p99']:.0f}"


def _ms(values: Mapping[str, float] | None, name: str) -> str:
    return "-" if values is None else f"{1e3 * values[name]:.0f}"
