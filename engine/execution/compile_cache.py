"""The persistent compile cache: where it is, and what it spared.

A program's key is its own text, the compiler's version and options, and the kind of device; two
starts of one version on one kind of device therefore meet the same entries. Steps are also kept
under keys that need no text, in the same folder: `program_store.py`.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

logger = logging.getLogger(__name__)

_HIT_EVENT = "/jax/compilation_cache/cache_hits"
_REQUEST_EVENT = "/jax/compilation_cache/compile_requests_use_cache"
_THRESHOLDS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
"""Small programs too: the many of a start add up to seconds."""


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
    for name, value in _THRESHOLDS.items():
        jax.config.update(name, value)


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
