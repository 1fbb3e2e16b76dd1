"""Processes that end with the one that started them, however that ends.

The parent keeps one end of a pipe that is the process's standard input, and writes nothing there.
When the parent is gone, the kernel closes its end.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import octavo

BOOT = """\
import sys
sys.path.append(sys.argv.pop(1))
from octavo.server.ray.guarded import run
run()
"""
"""What the process runs: it finds this package wherever its parent did."""
ORPHANED = 70
"""Exit status of a process whose parent is gone."""


def start(module: str, words: Sequence[str]) -> subprocess.Popen[str]:
    """Starts a guarded process.

    Args:
        module: of this package; its `main` is called with a list of words and returns the status.
        words: its arguments.

    Returns: the process. Its standard output and error are one pipe, which the caller must read.
        Its standard input is to be left open and alone.
    """
    root = str(Path(octavo.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-P", "-c", BOOT, root, module, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def run() -> None:
    """The process: ends at once when its parent is gone, so that devices are free for another."""
    threading.Thread(target=_end_with_parent, name="octavo-parent", daemon=True).start()
    sys.exit(importlib.import_module(sys.argv[1]).main(sys.argv[2:]))


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)
