"""The persistent compile cache: where it is, and what it spared.

A program's key is its own text, the compiler's version and options, and the kind of device; two
starts of one version on one kind of device therefore meet the same entries. Steps are also kept
under keys that need no text, in the same folder: `program_store.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

from octavo.engine.execution.programs.trusted_folder import who_else_writes
from octavo.pallas_kernels.compat import close_compilation_cache, settings_of_this_thread

logger = logging.getLogger(__name__)

_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_REQUEST_EVENT = "/jax/compilation_cache/compile_requests_use_cache"
_DIRECTORY = "jax_compilation_cache_dir"
_THRESHOLDS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
"""Small programs too: the many of a start add up to seconds."""
TRUST_ENV = "OCTAVO_TRUST_COMPILE_CACHE"
"""1: a cache folder is used whoever may write to it, as in a container with one user."""

_turns = threading.Lock()
_num_in_use = 0


@dataclass(frozen=True, slots=True)
class CompileCache:
    """Where an engine keeps its compiled programs between starts.

    Attributes:
        directory: a folder that nobody else can write to, or an address, to which JAX alone writes;
            None is none.
        settings: that JAX needs to keep its own cache there. None of them where JAX was told of a
            directory by the user, or where there is no cache.
    """

    directory: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """JAX looks into the folder for what the calling thread compiles meanwhile.

        The settings are the thread's, and no other code of the process sees them. JAX has one open
        cache a process, though: what other threads compile meanwhile is looked for here as well.
        """
        if not self.settings:
            yield
            return
        global _num_in_use
        with _turns:
            if _num_in_use == 0:
                close_compilation_cache()
            _num_in_use += 1
        try:
            with settings_of_this_thread(self.settings):
                yield
        finally:
            with _turns:
                _num_in_use -= 1
                if _num_in_use == 0:
                    close_compilation_cache()

    @property
    def folder(self) -> Path | None:
        """The folder of this machine; None where there is none."""
        is_here = self.directory is not None and "://" not in self.directory
        return Path(str(self.directory)) if is_here else None

    @property
    def num_bytes(self) -> int:
        """Of all that is kept on this machine."""
        files = () if self.folder is None else self.folder.rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file())


def open_compile_cache(directory: str | None) -> CompileCache:
    """The cache where JAX was told to keep one, or else in a folder of Octavo's.

    What is in the folder is run. If others than this user and root could have put it there, the
    engine goes without a cache and says so in its log.

    Args:
        directory: folder, made if missing for this user alone; None makes none.
    """
    told = jax.config.jax_compilation_cache_dir
    directory = told or directory
    if not directory or not jax.config.jax_enable_compilation_cache:
        return CompileCache()
    if "://" in directory:
        return CompileCache(told)
    folder = Path(directory)
    try:
        _make_folder(folder)
        why = None if os.environ.get(TRUST_ENV) == "1" else _who_else_writes(folder)
    except OSError as error:
        why = str(error)
    if why is not None:
        logger.warning(
            "no compile cache: %s. Its programs would be run; %s=1 uses it all the same",
            why,
            TRUST_ENV,
        )
        return CompileCache(settings={_DIRECTORY: None} if told else {})
    return CompileCache(directory, {} if told else {_DIRECTORY: directory, **_THRESHOLDS})


_who_else_writes = functools.cache(who_else_writes)
"""Asked once of each folder: a sound one stays sound, and has thousands of files to look at."""


def _make_folder(folder: Path) -> None:
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


class CacheCounts:
    """Programs that this process asked the compiler for, and those the cache had.

    Counted from the first instance on, over all threads; a program that the cache could not serve
    was compiled.

    Attributes:
        num_requests: programs asked for while a cache was in use.
        num_hits: found there, or ready to load (`program_store.py`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self.num_requests = 0
        self.num_hits = 0

    @property
    def num_compiled(self) -> int:
        return self.num_requests - self.num_hits

    @property
    def hits_of_this_thread(self) -> int:
        """Hits of the calling thread: tells whether the program it just asked for was there."""
        return int(getattr(self._local, "num_hits", 0))

    def count_hit(self) -> None:
        """A program was there without JAX having been asked for it."""
        with self._lock:
            self.num_requests += 1
            self.num_hits += 1

    def on_event(self, event: str, **_: Any) -> None:
        """JAX's listener."""
        if event == _HIT_EVENT:
            self._local.num_hits = self.hits_of_this_thread + 1
            with self._lock:
                self.num_hits += 1
        elif event == _REQUEST_EVENT:
            with self._lock:
                self.num_requests += 1


_counts: CacheCounts | None = None


def cache_counts() -> CacheCounts:
    """The process's counts; JAX's listeners are the process's too."""
    global _counts
    if _counts is None:
        _counts = CacheCounts()
        monitoring.register_event_listener(_counts.on_event)
    return _counts
