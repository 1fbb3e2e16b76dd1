"""Runs one client's checks, in the clients' own environment.

    python -m benchmarks.clients.worker MODULE URL MODEL KIND PACKAGE...

Prints JSON lines: first the packages' versions, or why the client is not there; then for each check
its name, its seconds, and what went wrong in it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from benchmarks.clients.place import Place

MOST_CHARS = 3000
"""Of what is told of a fault: its end."""


def _tell(line: dict[str, Any]) -> None:
    print(json.dumps(line), file=sys.__stdout__, flush=True)


def main() -> None:
    """Runs from the command line."""
    name, url, model, kind, *packages = sys.argv[1:]
    sys.stdout = sys.stderr  # what clients print
    try:
        versions = {package: version(package) for package in packages}
    except PackageNotFoundError as error:
        _tell({"absent": f"{error.name} is not installed"})
        return
    try:
        module = importlib.import_module(f"benchmarks.clients.{name}")
    except Exception:
        _tell({"versions": versions})
        _tell({"check": "import", "fault": traceback.format_exc()[-MOST_CHARS:], "seconds": 0.0})
        return
    _tell({"versions": versions})
    place = Place(url=url, model=model, packaged=kind == "packaged")
    for check, function in inspect.getmembers(module, inspect.isfunction):
        if not check.startswith("check_"):
            continue
        if getattr(function, "packaged_only", False) and not place.packaged:
            continue
        begun_s, fault = time.monotonic(), None
        try:
            function(place)
        except Exception:
            fault = traceback.format_exc()[-MOST_CHARS:]
        seconds = round(time.monotonic() - begun_s, 2)
        _tell({"check": check.removeprefix("check_"), "fault": fault, "seconds": seconds})


if __name__ == "__main__":
    main()
