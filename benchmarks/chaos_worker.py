"""A replica's process whose steps are paced: see `benchmarks.faulty_server`."""

from __future__ import annotations

from typing import Any

from octavo.engine.replicas import worker


def pace(engine: Any) -> None:
    """Has an engine's steps end no closer to each other than `PACE_S`."""
    from benchmarks.faulty_server import FaultyExecutor

    engine.executor = engine.core.executor = FaultyExecutor(engine.executor, is_paced=True)


def pace_worker() -> None:
    """Has the engine that this process will build paced."""
    whole = worker.build

    def build(*args: Any) -> Any:
        pace(engine := whole(*args))
        return engine

    worker.build = build
