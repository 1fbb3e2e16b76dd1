"""Peers are scripts that run from their own folder, and so do their tests."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
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
