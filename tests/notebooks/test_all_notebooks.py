"""Every notebook is one that a person can open anywhere: no outputs, code that is Python."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


def cells(name: str, kind: str) -> list[dict[str, Any]]:
    document = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))
    return [cell for cell in document["cells"] if cell["cell_type"] == kind]


def test_there_are_notebooks() -> None:
    assert {"quickstart.ipynb", "batch_inference.ipynb", "slo_scheduling.ipynb"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_committed_without_outputs(name: str) -> None:
    code = cells(name, "code")
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)


@pytest.mark.parametrize("name", NAMES)
def test_its_cells_are_python(name: str) -> None:
    for cell in cells(name, "code"):
        compile(
            "".join(cell["source"]), name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_its_links_lead_to_files(name: str) -> None:

    for cell in cells(name, "markdown"):
        for target in re.findall(r"\]\(([^)#]+)", "".join(cell["source"])):
            if "://" not in target:
                assert (NOTEBOOKS / target).exists(), target
