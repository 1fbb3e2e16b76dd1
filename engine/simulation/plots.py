"""Pictures of simulations and goodput benches. Needs matplotlib: the `plots` extra.

Each function draws one figure from plain results and writes it; the end of the path's name says
as what (.svg or .png). Drawing is deterministic: the same results give the same file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.engine.errors import InvalidConfigError

if TYPE_CHECKING:
    from octavo.engine.observability.schedule import Schedule

_SIZE = (7.0, 4.3)
_EMPHASIS = {"slo": {"linewidth": 2.4, "zorder": 5, "color": "black"}}


def _figure(title: str, x: str, y: str, size: tuple[float, float] = _SIZE) -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError as error:
        raise InvalidConfigError("plots", "matplotlib", "installed: the `plots` extra") from error
    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "octavo"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    return figure, axes


def _save(figure: Any, path: str | Path) -> None:
    from matplotlib import pyplot

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=130, metadata=metadata)
    pyplot.close(figure)


def _style(label: str) -> dict[str, Any]:
    return dict(_EMPHASIS.get(label, {"linewidth": 1.3}))


def plot_goodput(results: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Requests on time a second against the offered rate, a line for each policy.

    Args:
        results: of `measure_goodput`.
    """
    figure, axes = _figure("Goodput", "offered requests a second", "on time a second")
    most = 0.0
    for result in results:
        rates = [row["rate"] for row in result["rates"]]
        values = [row["on_time_per_s"] for row in result["rates"]]
        style = {"linestyle": "--"} if result["knows_lengths"] else {}
        axes.plot(
            rates, values, marker=".", label=result["label"], **{**_style(result["label"]), **style}
        )
        most = max(most, *values)
    ends = [row["rate"] for result in results for row in result["rates"]]
    axes.plot([0, max(ends)], [0, max(ends)], color="0.7", linestyle=":", label="all on time")
    axes.set_ylim(0, most * 1.15)
    axes.legend(fontsize=7, ncols=2)
    _save(figure, path)


def plot_attainment(
    results: Sequence[Mapping[str, Any]], path: str | Path, *, rate: float | None = None
) -> None:
    """Attainment by class at one rate, a group of bars for each policy.

    Args:
        results: of `measure_goodput`.
        rate: one of the measured ones; None takes the middle one.
    """
    rates = sorted({row["rate"] for result in results for row in result["rates"]})
    rate = rates[len(rates) // 2] if rate is None else rate
    rows = [
        (result["label"], row)
        for result in results
        for row in result["rates"]
        if row["rate"] == rate
    ]
    classes = list(rows[0][1]["classes"])
    figure, axes = _figure(
        f"Attainment by class at {rate:g} requests a second", "", "share on time",
        (max(7.0, 0.9 * len(rows)), 4.6),
    )  # fmt: skip
    width = 0.8 / len(classes)
    for index, name in enumerate(classes):
        values = [row["classes"].get(name, {}).get("attainment") or 0.0 for _, row in rows]
        places = [at + (index - (len(classes) - 1) / 2) * width for at in range(len(rows))]
        axes.bar(places, values, width, label=name or "all")
    axes.set_xticks(range(len(rows)), [label for label, _ in rows], rotation=40, ha="right",
                    fontsize=8)  # fmt: skip
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=8)
    _save(figure, path)


def plot_loads(rows: Sequence[Mapping[str, Any]], path: str | Path, *, title: str) -> None:
    """Attainment against load, a line for each policy and a dotted one for the bound.

    Args:
        rows: one for each load, with `load`, `attainment` by policy, and `bound`.
        title: of the plot.
    """
    rows = sorted(rows, key=lambda row: row["load"])
    figure, axes = _figure(title, "offered load, in capacities", "share on time")
    loads = [row["load"] for row in rows]
    for name in rows[0]["attainment"]:
        shares = [row["attainment"][name] for row in rows]
        axes.plot(loads, shares, marker=".", label=name, **_style(name))
    axes.plot(loads, [row["bound"] for row in rows], color="0.7", linestyle=":", label="bound")
    axes.set_ylim(0, 1.02)
    axes.legend(fontsize=7, ncols=2)
    _save(figure, path)


_LATE, _TIGHT, _EARLY, _FREE = "#c44e52", "#dd8452", "#4c72b0", "#8c8c8c"
TIGHT_S = 0.05
"""Less slack than this is shown as little."""


def plot_schedule(schedule: Schedule, path: str | Path, *, start_s: float = 0.0) -> None:
    """Rows by time: what each step did for each row, coloured by slack, below the tokens that the
    step computed. Chunks of prompts are tall, decode iterations low.

    Args:
        schedule: some seconds of it.
        start_s: the clock's time that the plot calls 0.
    """
    figure, rows = _figure("Schedule", "seconds", "row on the device", (10.0, 6.4))
    from matplotlib.patches import Patch

    rows.remove()
    tokens, rows = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    begins = [step.begin_s - start_s for step in schedule.steps]
    widths = [step.end_s - step.begin_s for step in schedule.steps]
    below = [0] * len(schedule.steps)
    for kind, color in (("decode", "0.75"), ("prefill", "0.35")):
        counts = [
            sum(cell.num_tokens for cell in step.cells if cell.kind == kind)
            for step in schedule.steps
        ]
        tokens.bar(begins, counts, widths, bottom=below, align="edge", color=color, label=kind)
        below = [low + count for low, count in zip(below, counts, strict=True)]
    tokens.set_yscale("symlog", linthresh=16)
    tokens.set(title="Schedule", ylabel="tokens")
    tokens.legend(fontsize=7, ncols=2)
    spans: dict[tuple[int, str, str], list[tuple[float, float]]] = {}
    for step, at_s, width_s in zip(schedule.steps, begins, widths, strict=True):
        for cell in step.cells:
            key = (cell.slot, cell.kind, _color(cell.slack_s))
            spans.setdefault(key, []).append((at_s, width_s))
    for (slot, kind, color), stretches in spans.items():
        height = 0.9 if kind == "prefill" else 0.4
        rows.broken_barh(stretches, (slot - height / 2, height), color=color, linewidth=0)
    for kind, marker in (("preempted", "v"), ("refused", "x"), ("swapped in", "^")):
        at = [mark.at_s - start_s for mark in schedule.marks if mark.kind == kind]
        if at:
            rows.plot(at, [0.01] * len(at), marker, color="black", markersize=5, label=kind,
                      transform=rows.get_xaxis_transform(), clip_on=False)  # fmt: skip
    tight = f"under {1e3 * TIGHT_S:g} ms"
    colors = {"late": _LATE, tight: _TIGHT, "early": _EARLY, "no target": _FREE}
    entries = [Patch(color=color, label=label) for label, color in colors.items()]
    marks, _ = rows.get_legend_handles_labels()
    figure.legend(handles=entries + marks, fontsize=7, ncols=7, loc="outside lower right")
    rows.set(xlabel="seconds", ylabel="row on the device")
    rows.yaxis.get_major_locator().set_params(integer=True)
    rows.invert_yaxis()
    _save(figure, path)


def _color(slack_s: float | None) -> str:
    if slack_s is None:
        return _FREE
    return _LATE if slack_s < 0 else _TIGHT if slack_s < TIGHT_S else _EARLY
