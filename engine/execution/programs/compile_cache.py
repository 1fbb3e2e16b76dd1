"""The persistent compile cache: where it is, and what it spared.

A program's key is its own text, the compiler's version and options, and the kind of device; two
starts of one version on one kind of device therefore meet the same entries. Steps are also kept
under keys that need no text, in the same folder: `program_store.py`.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from pathlib import Path
from typing import Any

import jax
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

from octavo.engine.execution.programs.trusted_folder import who_else_writes

logger = logging.getLogger(__name__)

_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_REQUEST_EVENT = "/jax/compilation_cache/compile_requests_use_cache"
_THRESHOLDS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
"""Small programs too: the many of a start add up to seconds."""


TRUST_ENV = "OCTAVO_TRUST_COMPILE_CACHE"
"""1: a cache folder is used whoever may write to it, as in a container with one user."""


def use_compile_cache(directory: str | None) -> None:
    """Keeps compiled programs on disk between runs: where JAX was told to, or else here.

    What is in the folder is run. If others than this user and root could have put it there, the
    process goes without a cache and says so in its log.

    Args:
        directory: folder, made if missing for this user alone; None makes none.
    """
    told = jax.config.jax_compilation_cache_dir
    directory = told or directory
    if directory is None or "://" in directory:
        return
    try:
        _make_folder(Path(directory))
        why = None if os.environ.get(TRUST_ENV) == "1" else _who_else_writes(Path(directory))
    except OSError as error:
        why = str(error)
    if why is not None:
        logger.warning(
            "no compile cache: %s. Its programs would be run; %s=1 uses it all the same",
            why,
            TRUST_ENV,
        )
        if told:
            jax.config.update("jax_compilation_cache_dir", None)
            compilation_cache.reset_cache()  # a program compiled before may have opened it
        return
    if told:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    for name, value in _THRESHOLDS.items():
        jax.config.update(name, value)


_who_else_writes = functools.cache(who_else_writes)
"""Asked once of each folder: a sound one stays sound, and has thousands of files to look at."""


def _make_folder(folder: Path) -> None:
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def cache_folder() -> Path | None:
    """The cache's folder in use; None where it is off or no folder of this machine's."""
    directory = jax.config.jax_compilation_cache_dir
    if not directory or "://" in directory or not jax.config.jax_enable_compilation_cache:
        return None
    return Path(directory)


def cache_size() -> tuple[str | None, int]:
    """The cache's folder in use (None: off) and the bytes in it."""
    directory = jax.config.jax_compilation_cache_dir
    if not directory:
        return None, 0
    return directory, sum(f.stat().st_size for f in Path(directory).rglob("*") if f.is_file())


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
