"""What a result was measured on: kept beside every figure."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any


def about_machine() -> dict[str, Any]:
    """Processor, cores that may be used, versions, date and command."""
    import jax

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "command": "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def write_result(result: dict[str, Any], out: Path | None) -> None:
    """Writes a result to its file, or to standard output."""
    text = json.dumps(result, indent=1)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
