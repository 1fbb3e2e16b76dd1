"""`octavo serve` whose steps fail or dawdle when told to.

    python -m benchmarks.faulty_server [--cheap-copies] [--paced] SERVE'S OPTIONS

Each line of standard input is a fault of the next step: `raise dispatch`, `raise result`, or `slow`
and seconds. With `--paced` no two steps end closer to each other than `PACE_S`, so that not the
processor is what is short, as with a device of its own.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import Any
from unittest import mock

from octavo.engine import any_engine
from octavo.engine.engine import Engine
from octavo.engine.scheduler.forecast import Forecast
from octavo.server.cli.main import main

CHEAP_COPIES = "--cheap-copies" in sys.argv
IS_PACED = "--paced" in sys.argv
PACE_S = 0.02


class FaultyExecutor:
    """The real executor, but for faults.

    Args:
        inner: what computes.
        is_paced: whether no two steps end closer to each other than `PACE_S`.

    Attributes:
        faults: words of faults to come, by the stage that they concern.
    """

    def __init__(self, inner: Any, *, is_paced: bool = IS_PACED) -> None:
        self._inner = inner
        self._is_paced = is_paced
        self._next_s = 0.0
        self.faults: dict[str, deque[list[str]]] = {"dispatch": deque(), "result": deque()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def dispatch(self, plan: Any) -> Any:
        """Of a step, unless it is to fail here."""
        self._suffer("dispatch")
        return self._inner.dispatch(plan)

    def result(self, handle: Any) -> Any:
        """Of a step, unless it is to fail here."""
        self._suffer("result")
        result = self._inner.result(handle)
        if self._is_paced:
            self._next_s = max(self._next_s + PACE_S, time.monotonic())
            time.sleep(max(0.0, self._next_s - time.monotonic()))
        return result

    def _suffer(self, stage: str) -> None:
        if self.faults[stage]:
            kind, value = self.faults[stage].popleft()
            if kind == "slow":
                time.sleep(float(value))
            else:
                raise RuntimeError(f"told to fail in {stage}")


def listen(executor: FaultyExecutor) -> None:
    """Takes orders until standard input ends."""
    for line in sys.stdin:
        words = line.split()
        executor.faults["result" if words[0] == "slow" else words[1]].append(words)


def build(*args: Any, **kwargs: Any) -> Engine:
    """An engine over a faulty executor."""
    engine = Engine(*args, **kwargs)
    executor = FaultyExecutor(engine.executor)
    engine.executor = engine.core.executor = executor  # type: ignore[assignment]
    if CHEAP_COPIES:
        cheapen_copies(engine)
    threading.Thread(target=listen, args=(executor,), daemon=True).start()
    return engine


def cheapen_copies(engine: Engine) -> None:
    """Has those who give way copied to the host: on a CPU, computing again is as quick."""
    engine.scheduler.forecast.page_copy_s = 1e-9
    Forecast.observe_copy = Forecast.observe_timed_copy = lambda self, *args: None  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    options = [option for option in sys.argv[1:] if option not in ("--cheap-copies", "--paced")]
    mock.patch.object(any_engine, "Engine", build).start()  # which fails where nobody reads it
    sys.exit(main(["serve", *options]))
