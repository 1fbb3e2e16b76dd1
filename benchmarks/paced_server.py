"""`octavo serve` over a device that takes `PACE_S` a step, so that not the processor is short.

python -m benchmarks.paced_server SERVE'S OPTIONS
"""

from __future__ import annotations

import sys
import time
from typing import Any

PACE_S = 0.02


class PacedExecutor:
    """The real executor, but that no two steps end closer to each other than `PACE_S`.

    Args:
        inner: what computes.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._next_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def result(self, handle: Any) -> Any:
        """Of a step, when its time has come."""
        result = self._inner.result(handle)
        self._next_s = max(self._next_s + PACE_S, time.monotonic())
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        return result


def pace(engine: Any) -> None:
    """Has an engine's steps end no closer to each other than `PACE_S`."""
    engine.executor = engine.core.executor = PacedExecutor(engine.executor)


def pace_worker() -> None:
    """Has the engine of this process, a replica's, paced once it is built."""
    from octavo.engine.replicas import worker

    whole = worker.build

    def build(*args: Any) -> Any:
        pace(engine := whole(*args))
        return engine

    worker.build = build


if __name__ == "__main__":
    from octavo.engine.async_engine import AsyncEngine
    from octavo.server.cli.main import main

    whole_init = AsyncEngine.__init__

    def init(self: AsyncEngine, *args: Any, **kwargs: Any) -> None:
        """As of `AsyncEngine`; then its steps are paced."""
        whole_init(self, *args, **kwargs)
        pace(self.engine)

    AsyncEngine.__init__ = init  # type: ignore[method-assign]
    sys.exit(main(["serve", *sys.argv[1:]]))
