"""Compiles the step's shapes: coarse ones before the engine is ready, others in the background.

The coarse shapes serve every plan, so an engine may answer as soon as it has them. A finer shape is
used from the moment its program is there, and no step ever waits for one. First comes the one whose
absence has cost most so far: padding times traffic. What an earlier start left ready to load is
neither traced nor compiled, and what another process is compiling is left to it meanwhile.
The module is long because the order of compiling, the threads that compile and what steps are told
of it share one lock.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from octavo.engine.errors import StepFailedError
from octavo.engine.execution.programs.compile_cache import CompileCache, cache_counts
from octavo.engine.execution.step_spec import StepShape
from octavo.pallas_kernels.compat import compile_lowered
from octavo.pallas_kernels.tuning import num_cores

logger = logging.getLogger(__name__)

COMPILE_THREADS, MAX_COMPILE_THREADS = 2, 8
"""On few cores, or beside weights in the same memory; and on many: half of them. Each thread may
take gigabytes of the host's memory."""
CLAIM_POLL_S, CLAIM_WAIT_S = 0.1, 300.0
"""Between looks at what other processes are compiling; after so long it is compiled here too."""
BEHIND_NICENESS = 10

Program = Callable[..., Any]


class Claim(Protocol):
    """The right to make a program; see `ProgramStore.claim`."""

    def release(self) -> None: ...


class Store(Protocol):
    """Programs that earlier starts left; see `ProgramStore`. Called from several threads."""

    def claim(self, name: str) -> Claim | None: ...

    def has(self, name: str) -> bool: ...

    def load(self, name: str) -> Program | None: ...

    def load_lowered(self, name: str, lowered: Any) -> Program | None: ...

    def save(self, name: str, lowered: Any, program: Program) -> Program | None: ...

    def drop(self, name: str) -> None: ...


class Left(NamedTuple):
    """A program that was left in the store: seconds it took, and whether a cache had it."""

    seconds: float
    was_cached: bool


class Maker(Protocol):
    """Compiles programs apart and leaves them in the store; see `ProgramMaker`."""

    def make(self, shape: StepShape) -> Left | None: ...

    def close(self) -> None: ...


class Peers(Protocol):
    """Other hosts that run the same programs together with this one."""

    def has(self, shape: StepShape) -> bool: ...

    def begin(self, shape: StepShape) -> None: ...


class _Made(NamedTuple):
    """A program, the seconds it took, and whether a cache had it."""

    program: Program
    seconds: float
    was_cached: bool


class _NoClaim:
    """The right to what nobody else could want."""

    def release(self) -> None: ...


_NO_CLAIM = _NoClaim()


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
        store: where programs are looked for before, by their shape's text, and left; None is none.
        maker: what compiles the shapes behind and leaves them in the store; None, or one that does
            not do it, leaves that to this process.
        cache: JAX's own, for what is compiled here; None is the process's.
        compiler_options: of a shape's `jax.stages.Lowered.compile`.
        has_room: whether the host has memory for another program; asked before each behind.
        max_threads: programs that are compiled at once before readiness, where cores allow it.
        tidy: called when a program is there, so that what making it took is given back.
        fail_after_ready: raise instead of compiling on the request path.
    """

    def __init__(
        self,
        lower: Callable[[StepShape], Any],
        *,
        store: Store | None = None,
        maker: Maker | None = None,
        cache: CompileCache | None = None,
        compiler_options: Callable[[StepShape], dict[str, str] | None] = lambda shape: None,
        has_room: Callable[[], bool] = lambda: True,
        max_threads: int = COMPILE_THREADS,
        tidy: Callable[[], None] = lambda: None,
        fail_after_ready: bool = False,
    ) -> None:
        self._lower = lower
        self._store = store
        self._maker = maker
        self._cache = cache or CompileCache()
        self.compiler_options = compiler_options
        self._has_room = has_room
        self._max_threads = max_threads
        self._tidy = tidy
        self._fail_after_ready = fail_after_ready
        self._programs: dict[StepShape, Program] = {}
        self._loading: dict[StepShape, Future[_Made | None]] = {}
        self._made_apart: set[str] = set()
        self._ready = False
        self._behind: threading.Thread | None = None
        self._missed: dict[StepShape, float] = {}
        self._stop = threading.Event()
        self.stats = CompileStats()
        self.peers: Peers | None = None
        """Hosts that must have a program, too, before it is used; told which is made behind."""

    def begin(self, shapes: tuple[StepShape, ...]) -> None:
        """Begins to load those of `shapes` that the store has, in threads; `warm_up` takes them."""
        if self._store is None:
            return
        pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="octavo-load-program")
        self._loading = {shape: pool.submit(self._load, shape) for shape in shapes}
        pool.shutdown(wait=False)

    def warm_up(
        self,
        shapes: tuple[StepShape, ...],
        on_compiled: Callable[[StepShape], None] | None = None,
        *,
        behind: tuple[StepShape, ...] = (),
    ) -> None:
        """Loads or compiles those of `shapes` that are not there, is ready, and goes on with the
        shapes `behind` in a thread: the most missed first, and in this order while none is.

        Tracing holds the interpreter lock and runs in order; loading and compiling release it and
        run in threads beside. No more is claimed than these are at, so that processes which start
        together share what there is to do.
        """
        shapes = tuple(shape for shape in shapes if shape not in self._programs)
        if not self._loading:
            self.begin(shapes)

        def keep(shape: StepShape, made: _Made) -> None:
            self._keep(shape, made)
            if on_compiled is not None:
                on_compiled(shape)

        cores = num_cores()
        num_threads = min(self._max_threads, cores, max(COMPILE_THREADS, cores // 2))
        is_free = threading.Semaphore(num_threads)
        with (
            contextlib.ExitStack() as on_failure,
            ThreadPoolExecutor(num_threads, thread_name_prefix="octavo-compile") as pool,
        ):
            pending: list[tuple[StepShape, Future[_Made]]] = []
            elsewhere = []
            for shape in shapes:
                while pending and pending[0][1].done():
                    done, future = pending.pop(0)
                    keep(done, future.result())
                made = self._loaded(shape)
                if made is not None:
                    keep(shape, made)
                    continue
                is_free.acquire()
                claim = self._claim(shape)
                if claim is None:
                    is_free.release()
                    elsewhere.append(shape)
                    continue
                on_failure.callback(claim.release)
                made = self._load(shape)
                if made is not None:  # others made it between the look and the claim
                    claim.release()
                    is_free.release()
                    keep(shape, made)
                    continue
                begun = time.perf_counter()
                lowered = self._lower(shape)
                traced_s = time.perf_counter() - begun
                future = pool.submit(self._make, shape, lowered, traced_s, claim)
                future.add_done_callback(lambda _: is_free.release())
                pending.append((shape, future))
                del lowered
            for shape, future in pending:
                keep(shape, future.result())
            on_failure.pop_all()
        self._tidy()
        # Last: those who make them may be waiting for what was made here.
        until_s = time.monotonic() + CLAIM_WAIT_S
        for shape in elsewhere:
            while (freed := self._claim(shape)) is None and time.monotonic() < until_s:
                time.sleep(CLAIM_POLL_S)
            self._compile(shape, freed)
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

    def is_left(self, shape: StepShape) -> bool:
        """Whether an earlier start seems to have left the shape's program: it may not load."""
        return self._store is not None and self._store.has(str(shape))

    def has(self, shape: StepShape) -> bool:
        """Whether the shape's program is there, so that a step can use it at once."""
        return shape in self._programs and (self.peers is None or self.peers.has(shape))

    @property
    def is_complete(self) -> bool:
        """Whether nothing is compiled behind, or nothing more."""
        return self._behind is None or not self._behind.is_alive()

    def miss(self, shape: StepShape, waste: float) -> None:
        """Tells what a step wasted because the shape's program is not there yet.

        Args:
            waste: in a unit that all shapes share.
        """
        self._missed[shape] = self._missed.get(shape, 0.0) + waste

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

    def make(self, shape: StepShape) -> bool:
        """Makes a program in the background, as another host does; whether it is there. From any
        thread."""
        _be_nice()
        try:
            if shape not in self._programs and self._has_room():
                self._compile(shape)
        except Exception:
            logger.exception("could not compile %s", shape)
        self._tidy()
        return shape in self._programs

    def distrust(self) -> None:
        """Has the store forget what it gave: a later start compiles it anew."""
        for name in (*tuple(self.stats.from_cache), *tuple(self._made_apart)):  # both may grow
            if self._store is not None:
                self._store.drop(name)

    def wait(self) -> None:
        """Waits until nothing is left to compile behind."""
        if self._behind is not None:
            self._behind.join()

    def close(self) -> None:
        """Ends compiling behind: waits for the shape that is compiled in this process, and leaves
        out the rest."""
        self._stop.set()
        if self._maker is not None:
            self._maker.close()
        self.wait()

    def _compile_behind(self, shapes: tuple[StepShape, ...]) -> None:
        _be_nice()
        left = list(shapes)
        while left and not self._stop.is_set():
            if not self._has_room():
                logger.warning(
                    "leaving out %d finer programs: the host is short of memory", len(left)
                )
                break
            by_need = sorted(left, key=lambda shape: -self._missed.get(shape, 0.0))
            claims = ((shape, self._claim(shape)) for shape in by_need)
            shape, claim = next((each for each in claims if each[1]), (by_need[0], None))
            if claim is None:  # others are at all that is left
                self._stop.wait(CLAIM_POLL_S)
                continue
            left.remove(shape)
            try:
                if self.peers is not None:
                    self.peers.begin(shape)
                left_apart = self._make_apart(shape)
                if self._stop.is_set():
                    claim.release()
                    break
                self._compile(shape, claim, left_apart)
            except Exception:
                # Coarser shapes go on serving what this one would have.
                logger.exception("could not compile %s", shape)
            self._tidy()
        if self._maker is not None:
            self._maker.close()
        atexit.unregister(self.close)

    def leave(self, shape: StepShape, writing: AbstractContextManager[Any]) -> Left | None:
        """Compiles a program for the store alone; None if the store does not have it for all that.

        Args:
            writing: held while it is written down.
        """
        assert self._store is not None
        begun = time.perf_counter()
        lowered = self._lower(shape)
        made = self._compile_lowered(shape, lowered, 0.0)
        if not made.was_cached:
            with writing:
                self._store.save(str(shape), lowered, made.program)
        if not self._store.has(str(shape)):
            return None
        return Left(time.perf_counter() - begun, made.was_cached)

    def _make_apart(self, shape: StepShape) -> Left | None:
        """Has the store have a program that it lacks; None if that was not made apart."""
        return None if self._maker is None or self.is_left(shape) else self._maker.make(shape)

    def _claim(self, shape: StepShape) -> Claim | None:
        """The right to make a shape's program; None while another process has it."""
        return _NO_CLAIM if self._store is None else self._store.claim(str(shape))

    def _compile(
        self, shape: StepShape, claim: Claim | None = None, left: Left | None = None
    ) -> Program:
        """Loads or compiles a shape in this thread; then the claim is released.

        Args:
            left: what making it apart just came to, if it was.
        """
        try:
            made = self._load(shape)
            if made is None:
                begun = time.perf_counter()
                lowered = self._lower(shape)
                made = self._make(shape, lowered, time.perf_counter() - begun, _NO_CLAIM)
            elif left is not None:
                made = _Made(made.program, made.seconds + left.seconds, left.was_cached)
                self._made_apart.add(str(shape))
            self._keep(shape, made)
            return made.program
        finally:
            if claim is not None:
                claim.release()

    def _loaded(self, shape: StepShape) -> _Made | None:
        """What loading a shape came to, once it has ended."""
        future = self._loading.pop(shape, None)
        return None if future is None else future.result()

    def _load(self, shape: StepShape) -> _Made | None:
        begun = time.perf_counter()
        program = None if self._store is None else self._store.load(str(shape))
        if program is None:
            return None
        return _Made(program, time.perf_counter() - begun, was_cached=True)

    def _compile_lowered(self, shape: StepShape, lowered: Any, traced_s: float) -> _Made:
        counts, begun = cache_counts(), time.perf_counter()
        hits = counts.hits_of_this_thread
        program = None if self._store is None else self._store.load_lowered(str(shape), lowered)
        was_cached = program is not None
        if program is None:
            with self._cache.in_use():
                program = compile_lowered(lowered, self.compiler_options(shape))
            was_cached = counts.hits_of_this_thread > hits
        return _Made(program, time.perf_counter() - begun + traced_s, was_cached)

    def _make(self, shape: StepShape, lowered: Any, traced_s: float, claim: Claim) -> _Made:
        """Compiles a program, leaves it to later starts, takes what they will load in its place,
        if that is less, and releases the claim.

        Writing it down holds the interpreter for a second: better before a request comes than
        beside it.
        """
        try:
            made = self._compile_lowered(shape, lowered, traced_s)
            if self._store is None or made.was_cached:
                return made
            lighter = self._store.save(str(shape), lowered, made.program)
            return made if lighter is None else made._replace(program=lighter)
        finally:
            claim.release()

    def _keep(self, shape: StepShape, made: _Made) -> None:
        self.stats.seconds[str(shape)] = made.seconds
        if made.was_cached:
            self.stats.from_cache.add(str(shape))
        self._programs[shape] = made.program
        logger.info("%s: %.1f s%s", shape, made.seconds, ", from the cache" * made.was_cached)


def _be_nice() -> None:
    """Lets steps go first where the system schedules threads by their own niceness (Linux)."""
    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND_NICENESS)
