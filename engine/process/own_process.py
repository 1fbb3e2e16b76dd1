"""What Octavo changes of a whole process, in processes that are its own and in no other.

`LLM`, `AsyncEngine` and `OctavoServer` may live in a notebook or in another service. That process
is its author's, so importing or building any of these changes no setting of it. Octavo's own
processes are the `octavo` commands and the workers of replicas. They alone call this module.

| what | why | where |
|---|---|---|
| malloc's thresholds and arenas (`allocator.py`) | steps keep memory | on CPUs, with an engine |
| the collector's thresholds (`collector.py`) | no pause in a flood of calls | `octavo serve` |
| what the collector leaves out (`collector.py`) | what is loaded stays | that, and workers |
| the interpreter's switch interval (`interpreter_share.py`) | engine first | `octavo serve` |
| the event loop's timer slack (`interpreter_share.py`) | likewise | that, on Linux |
| the soft limit of open files (`file_limit.py`) | a connection is a file | `octavo serve` |

`server/serve.py` handles SIGTERM and SIGINT while `octavo serve` runs. A worker of a replica leaves
both signals to its parent and keeps to its cores. Processes that compile or render chats have a
niceness and limits of their own. JAX's settings are changed for no process: `compile_cache.py`
changes them for the threads that compile, while they do.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.engine.early_checks import has_only_cpus
from octavo.engine.process.allocator import keep_freed_memory
from octavo.engine.process.collector import Collector
from octavo.engine.process.file_limit import raise_file_limit
from octavo.engine.process.interpreter_share import prefer_engine_thread


def prepare_to_compute(environ: Mapping[str, str]) -> bool:
    """Makes the settings of a process that runs an engine. It comes before JAX looks for devices.

    They serve CPUs alone. If JAX could find another device here, nothing is changed; on a CPU with
    a plugin for others installed, `JAX_PLATFORMS=cpu` says so.

    Args:
        environ: of the process.

    Returns:
        Whether memory that a step frees is kept for the next one.
    """
    return has_only_cpus(environ) and keep_freed_memory()


class ServingProcess:
    """The settings of `octavo serve`, made as it starts. Its methods are called in this order."""

    def prepare_to_listen(self) -> None:
        """Before ports are bound."""
        raise_file_limit()

    def leave_out_what_is_loaded(self) -> None:
        """Once the model is loaded."""
        self._collector = Collector()

    def prefer_engine_thread(self) -> None:
        """In the event loop's thread, once the engine's thread runs."""
        prefer_engine_thread()

    def tidy(self) -> None:
        """Every now and then, while it serves."""
        self._collector.tidy()
