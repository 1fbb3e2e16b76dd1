"""Benchmarks that are scripts: each runs from its own folder, and so do their tests."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PEERS = BENCHMARKS / "peers"
_NAMES = ("peer", "table", "catalogue", "workload_file", "run", "octavo_peer")


@pytest.fixture
def peers_module(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of benchmarks/peers by name, for this test alone."""
    monkeypatch.syspath_prepend(str(PEERS))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in _NAMES:
        module = sys.modules.get(name)
        if module is not None and Path(str(module.__file__)).parent == PEERS:
            del sys.modules[name]


@pytest.fixture(scope="module")
def script() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of benchmarks/ by its name, under another, for these tests alone."""
    loaded = []

    def load(name: str) -> ModuleType:
        path = BENCHMARKS / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{name}_benchmark", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        loaded.append(spec.name)
        spec.loader.exec_module(module)
        return module

    sys.path.insert(0, str(BENCHMARKS))  # they import their neighbours
    yield load
    sys.path.remove(str(BENCHMARKS))
    for name in loaded:
        del sys.modules[name]
