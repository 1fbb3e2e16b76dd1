"""The quickstart notebook runs, cell by cell, as a person would run it.

Its code cells are executed in order in one fresh Python with the notebook's folder as the working
directory. That is what a kernel does but for rich display, and it needs no Jupyter in the test
environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"

RUN_CELLS = """
import ast, asyncio, inspect, json, sys

async def run(cells):
    space = {"__name__": "__main__"}
    for number, source in enumerate(cells):
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(source, f"<cell {number}>", "exec", flags=flags)
        result = eval(code, space)
        if inspect.isawaitable(result):
            await result
    return space

space = asyncio.run(run(json.load(sys.stdin)))
facts = {
    "texts": [output.outputs[0].text for output in space["outputs"]],
    "reply": space["reply"].outputs[0].text,
    "streamed": space["streamed"],
    "final": space["output"].outputs[0].text,
    "finished": space["output"].finished,
}
print("FACTS " + json.dumps(facts))
"""


def code_cells(notebook: str) -> list[str]:
    document = json.loads((NOTEBOOKS / notebook).read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in document["cells"] if c["cell_type"] == "code"]


def test_its_cells_run_in_order() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_CELLS],
        input=json.dumps(code_cells("quickstart.ipynb")),
        capture_output=True,
        text=True,
        cwd=NOTEBOOKS,
        timeout=600,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{done.stderr[-4000:]}")
    facts = json.loads(done.stdout.rpartition("FACTS ")[2])
    assert "Paris" in facts["texts"][0]
    assert all(facts["texts"])
    assert facts["reply"]
    assert facts["finished"]
    assert facts["streamed"] == facts["final"] != ""
