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

import jax

from octavo.engine.errors import StepFailedError
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
        num_after_ready: programs a step had to wait for; 0 in a sound engine.
    """

    seconds: dict[str, float] = field(default_factory=dict)
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
                program, compiled_s = future.result()
                self._programs[shape] = program
                self.stats.seconds[str(shape)] = traced_s + compiled_s
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
        program, seconds = _timed(lambda: self._lower(shape).compile())
        self.stats.seconds[str(shape)] = seconds
        self._programs[shape] = program
        return program


def _be_nice() -> None:
    """Lets steps go first where the system schedules threads by their own niceness (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND_NICENESS)


def _timed(function: Callable[[], Program]) -> tuple[Program, float]:
    begun = time.perf_counter()
    result = function()
    return result, time.perf_counter() - begun


def use_compile_cache(directory: str | None) -> None:
    """Keeps compiled programs on disk between runs, unless JAX was told where to already.

    Args:
        directory: folder, made if missing; None changes nothing.
    """
    if directory is None or jax.config.jax_compilation_cache_dir:
        return
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        logger.warning("no compile cache: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
