"""The notebook on scheduling runs, on less traffic, and shows what it says that it shows."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "slo_scheduling.ipynb"


LESS = {
    "DURATION_S = 60.0": "DURATION_S = 15.0",
    "RATES = (1.0, 2.0, 3.0, 4.0, 5.0)": "RATES = (1.0, 5.0)",
    "10.0, 20.0": "5.0, 10.0",
}


@pytest.fixture(scope="module")
def space() -> dict[str, Any]:
    """Its variables after a run, and its figures."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    space: dict[str, Any] = {"drawn": []}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"])
            for whole, part in LESS.items():
                code = code.replace(whole, part)
            exec(code, space)
            for number in pyplot.get_fignums():
                figure = pyplot.figure(number)
                figure.canvas.draw()
                space["drawn"].append(sum(len(a.lines) + len(a.patches) for a in figure.axes))
                pyplot.close(figure)
    return space


def test_the_slo_policy_keeps_the_most_promises(space: dict[str, Any]) -> None:
    on_time = {policy: report.attainment for policy, report in space["busy"].items()}
    assert max(on_time, key=on_time.__getitem__) == "slo"
    assert statistics.mean(space["by_seed"]["slo"]) > statistics.mean(space["by_seed"]["fcfs"])


def test_everybody_is_well_served_while_there_is_room(space: dict[str, Any]) -> None:
    assert all(shares[0] > 0.85 for shares in space["attainment"].values())


def test_each_figure_shows_its_data(space: dict[str, Any]) -> None:
    lines, waits, steps = space["drawn"]
    assert lines == 5
    assert waits == 5
    assert steps > 100
