"""The scheduler's modules import each other in few floors: whoever reads one reads little below."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import octavo.engine.scheduler

PACKAGE = "octavo.engine.scheduler"
MOST_FLOORS = 9
"""Modules on the longest chain of imports."""


def imports() -> dict[str, set[str]]:
    """The scheduler's modules, each with those of them that it imports, for its types included."""
    root = Path(octavo.engine.scheduler.__file__).parent
    paths = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join((PACKAGE, *parts)).removesuffix(".__init__")] = path
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        found[module] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for name in (f"{node.module}.{alias.name}" for alias in node.names):
                    found[module].add(name if name in paths else node.module)
        found[module] &= paths.keys() - {module}
    return found


def test_imports_form_few_floors_and_no_cycle() -> None:
    graph = imports()
    assert len(graph) > 20
    floors: dict[str, int] = {}
    for module in TopologicalSorter(graph).static_order():  # raises CycleError
        floors[module] = 1 + max((floors[below] for below in graph[module]), default=0)
    assert max(floors.values()) <= MOST_FLOORS, floors
