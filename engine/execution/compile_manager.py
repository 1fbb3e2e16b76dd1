"""Compiles the step's shapes: the coarse ones before the engine is ready, the rest behind.

The coarse shapes serve every plan, so an engine may answer as soon as it has them. A finer shape is
used from the moment its program is there, and no step ever waits for one.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.errors import StepFailedError
from octavo.engine.execution.compile_cache import cache_counts
from octavo.engine.execution.step_spec import StepShape

logger = logging.getLogger(__name__)

COMPILE_THREADS = 2
BEHIND_NICENESS = 10

Program = Callable[..., Any]


@dataclass(slots=True)
class CompileStats:
    """What compiling cost.

    Attributes:
        seconds: wall time by shape, tracing included.
        from_cache: shapes whose program the persistent cache had.
        num_after_ready: programs a step had to wait for; 0 in a sound engine.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    from_cache: set[str] = field(default_factory=set)
    num_after_ready: int = 0


class CompileManager:
    """Compiled programs by shape. Used from the engine's thread; one thread of its own compiles.

    Args:
        lower: traces and lowers a shape to a `jax.stages.Lowered`; called from both threads.
        fail_after_ready: raise instead of compiling on the request path.
    """

    def __init__(
        self, lower: Callable[[StepShape], Any], *, fail_after_ready: bool = False
    ) -> None:
        self._lower = lower
        self._fail_after_ready = fail_after_ready
        self._programs: dict[StepShape, Program] = {}
        self._ready = False
        self._behind: threading.Thread | None = None
        self._stop = threading.Event()
        self.stats = CompileStats()

    def warm_up(
        self,
        shapes: tuple[StepShape, ...],
        on_compiled: Callable[[StepShape], None] | None = None,
        *,
        behind: tuple[StepShape, ...] = (),
    ) -> None:
        """Compiles `shapes`, is ready, and goes on with the shapes `behind` in a thread.

        Tracing holds the interpreter lock and runs in order; compiling releases it and runs in
        threads beside.
        """
        with ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="octavo-compile") as pool:
            pending = []
            for shape in shapes:
                begun = time.perf_counter()
                lowered = self._lower(shape)
                traced_s = time.perf_counter() - begun
                pending.append((shape, traced_s, pool.submit(_timed, lowered.compile)))
            for shape, traced_s, future in pending:
                program, compiled_s, was_cached = future.result()
                self._keep(shape, program, traced_s + compiled_s, was_cached)
                if on_compiled is not None:
                    on_compiled(shape)
        self._ready = True
        if behind:
            self._behind = threading.Thread(
                target=self._compile_behind, args=(behind,), name="octavo-compile", daemon=True
            )
            # The interpreter may not go away under a compiler: it stops after the current shape.
            atexit.register(self.close)
            self._behind.start()

    def has(self, shape: StepShape) -> bool:
        """Whether the shape's program is there, so that a step can use it at once."""
        return shape in self._programs

    def get(self, shape: StepShape) -> Program:
        """The program of a shape; compiles it now, and says so, if it is not there.

        Raises:
            StepFailedError: it would have to compile and `fail_after_ready` is set.
        """
        program = self._programs.get(shape)
        if program is None:
            if self._ready:
                if self._fail_after_ready:
                    raise StepFailedError(f"step {shape} was not compiled before the engine began")
                self.stats.num_after_ready += 1
                logger.warning("compiling %s while requests wait", shape)
            program = self._compile(shape)
        return program

    def wait(self) -> None:
        """Waits until nothing is left to compile behind."""
        if self._behind is not None:
            self._behind.join()

    def close(self) -> None:
        """Ends compiling behind: waits for the shape it is at and leaves out the rest."""
        self._stop.set()
        self.wait()

    def _compile_behind(self, shapes: tuple[StepShape, ...]) -> None:
        _be_nice()
        for shape in shapes:
            if self._stop.is_set():
                break
            try:
                self._compile(shape)
            except Exception:
                # Coarser shapes go on serving what this one would have.
                logger.exception("could not compile %s", shape)
        atexit.unregister(self.close)

    def _compile(self, shape: StepShape) -> Program:
        program, seconds, was_cached = _timed(lambda: self._lower(shape).compile())
        self._keep(shape, program, seconds, was_cached)
        return program

    def _keep(self, shape: StepShape, program: Program, seconds: float, was_cached: bool) -> None:
        self.stats.seconds[str(shape)] = seconds
        if was_cached:
            self.stats.from_cache.add(str(shape))
        self._programs[shape] = program
        logger.info("%s: %.1f s%s", shape, seconds, ", from the cache" if was_cached else "")


def _be_nice() -> None:
    """Lets steps go first where the system schedules threads by their own niceness (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND_NICENESS)


def _timed(function: Callable[[], Program]) -> tuple[Program, float, bool]:
    """The program, seconds, and whether the persistent cache had it."""
    counts, begun = cache_counts(), time.perf_counter()
    hits = counts.hits_of_this_thread
    result = function()
    return result, time.perf_counter() - begun, counts.hits_of_this_thread > hits
