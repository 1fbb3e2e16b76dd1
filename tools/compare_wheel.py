"""Checks that a wheel holds every committed file of the packages, as real files.

Run as ``python tools/compare_wheel.py WHEEL`` in a checkout.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("engine", "models", "pallas_kernels", "server", "sharding")
SHIPPED = (".py", ".pyi", ".json", ".proto", "py.typed")


def expected_files() -> set[str]:
    """Committed files of the packages that must ship, as paths within the wheel."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *FOLDERS, "src/octavo"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    return {
        name.removeprefix("src/") if name.startswith("src/") else f"octavo/{name}"
        for name in listed
        if name.endswith(SHIPPED) and (ROOT / name).is_file()
    }


def main(wheel: str) -> int:
    """0 if the wheel is whole; otherwise 1, naming what is missing or linked."""
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    packed = {entry.filename for entry in entries}
    linked = sorted(e.filename for e in entries if (e.external_attr >> 28) == 0o12)
    missing = sorted(expected_files() - packed)
    for problem, names in (("missing from", missing), ("symlinked in", linked)):
        if names:
            print(f"{problem} {Path(wheel).name}: {', '.join(names)}", file=sys.stderr)
    if not missing and not linked:
        print(f"{Path(wheel).name}: {len(packed)} files, nothing missing")
    return 1 if missing or linked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
