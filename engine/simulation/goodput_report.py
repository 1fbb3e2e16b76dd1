"""What a goodput bench runs besides the comparison itself, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from octavo.engine.simulation.goodput import Candidate, run_once
from octavo.engine.simulation.settings import Setting
from octavo.engine.simulation.step_time import StepWork

BUDGETS = (128, 256, 512, 1024, 2048, 4096)
"""Static token budgets of the throughput plot; a step holds at least a token a row."""


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
    rates = [row["rate"] for row in results[0]["rates"]]
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
        cells += [_estimate(row["attainment"], 3) for row in result["rates"]]
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
        "refused", "refused in p50", "preempted", "recompute", "swapped pages", "Jain",
        "longest wait s",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for result in results:
        row = next(row for row in result["rates"] if row["rate"] == rate)
        cells = [
            result["label"], _pair(row["ttft_s"]), _pair(row["tpot_s"]),
            _ms(row["itl_s"], "p99"),
            f"{row['e2e_s']['p99']:.1f}" if row["e2e_s"] else "-",
            f"{row['worst_stall_s']:.2f}",
            f"{row['num_refused'] / max(1, row['num_requests']):.1%}",
            _ms(row["time_to_refuse_s"], "p50"),
            f"{row['num_preemptions']:.0f}", f"{row['recompute_share']:.1%}",
            f"{row['swapped_pages_out']:.0f}", f"{row['jain_index']:.2f}",
            f"{row['longest_wait_s']:.1f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def budget_sweep(
    setting: Setting,
    *,
    seed: int,
    rate: float,
    policy: str = "fcfs",
    budgets: Iterable[int] = BUDGETS,
) -> list[dict[str, float]]:
    """Throughput and p99 TPOT of each static token budget, at a rate that saturates."""
    rows = []
    for budget in budgets:
        if budget < setting.limits.max_num_seqs:
            continue
        report = run_once(setting, Candidate(policy=policy, token_budget=budget), rate, seed)
        summary = report.summary()
        tokens = sum(r.num_input + r.num_output for r in report.records if r.is_served)
        rows.append(
            {
                "token_budget": budget,
                "tokens_per_s": tokens / report.duration_s,
                "tpot_p99_s": summary["tpot_s"]["p99"] if summary["tpot_s"] else 0.0,
                "attainment": summary["attainment"],
            }
        )
    return rows


def parameter_sweep(
    setting: Setting,
    policy: str,
    parameter: str,
    values: Iterable[float],
    *,
    seed: int,
    rate: float,
) -> list[dict[str, float]]:
    """What a policy's parameter does to each class's attainment and longest wait."""
    rows = []
    for value in values:
        separator = "," if ":" in policy else ":"
        candidate = Candidate(policy=f"{policy}{separator}{parameter}={value:g}")
        summary = run_once(setting, candidate, rate, seed).summary()
        row = {parameter: value, "longest_wait_s": summary["longest_wait_s"]}
        for name, figures in summary["classes"].items():
            row[f"{name or 'all'} attainment"] = figures["attainment"]
            row[f"{name or 'all'} served"] = figures["num_served"] / figures["num_requests"]
        rows.append(row)
    return rows


def break_even(setting: Setting, lengths: Iterable[int] | None = None) -> list[dict[str, float]]:
    """Seconds to swap a sequence out and in, and to compute it again, by its length."""
    page = setting.limits.page_size
    chunk = min(2048, setting.limits.max_num_batched_tokens)
    rows = []
    for length in lengths or (64, 128, 256, 512, 1024, 2048, 4096, 8192):
        recompute_s = 0.0
        for start in range(0, length, chunk):
            n = min(chunk, length - start)
            work = StepWork(
                0, 1, n, prefill_context=start, prefill_attention=n * (start + (n + 1) / 2)
            )
            recompute_s += setting.step_time.seconds(work)
        swap_s = 2 * setting.link.seconds(-(-length // page))
        rows.append({"num_tokens": length, "swap_s": swap_s, "recompute_s": recompute_s})
    return rows


def _estimate(value: Mapping[str, Any], digits: int) -> str:
    half = value["ci95"]
    text = "≥ " * bool(value.get("at_least")) + f"{value['mean']:.{digits}f}"
    return text if half is None else f"{text} ± {half:.{digits}f}"


def _pair(values: Mapping[str, float] | None) -> str:
    return "-" if values is None else f"{1e3 * values['p50']:.0f} / {1e3 * values['p99']:.0f}"


def _ms(values: Mapping[str, float] | None, name: str) -> str:
    return "-" if values is None else f"{1e3 * values[name]:.0f}"
