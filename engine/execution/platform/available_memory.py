"""How much memory a host has left for this process, its container's limit included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

PROGRAM_BYTES = 2 << 30
"""Available memory below which no finer program is made: compiling one for a CPU takes up to half a
gigabyte (its text of 90,000 operations, above all), loading one a tenth, and others want some."""


class _Names(NamedTuple):
    """What a version of control groups calls its files, and what could be reclaimed in them."""

    limit: str
    usage: str
    inactive_file: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process can take before the host, or a control group of it, has none left.

    Pages of files that could be dropped count as available: on a host that has read a lot, next
    to nothing else is free.

    Args:
        root: where the host's `/proc` and `/sys` are.

    Returns:
        Bytes, at least 0; None where the host does not say.
    """
    available = [each for each in (_of_host(root), *_of_groups(root)) if each is not None]
    return max(0, min(available)) if available else None


def has_room_for_programs() -> bool:
    """Whether the host has memory to make another program; also where it does not say."""
    available = available_memory_bytes()
    return available is None or available >= PROGRAM_BYTES


def _of_host(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) << 10
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None


def _of_groups(root: Path) -> Iterator[int | None]:
    """What each control group that this process is in leaves it; None of one without a limit."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers:
            names, top = _V2, mount
        elif "memory" in controllers.split(","):
            names, top = _V1, mount / "memory"
        else:
            continue
        # In a container the group's own path may be the host's, of which only the top is seen.
        inside = PurePosixPath(path.lstrip("/"))
        for each in (inside, *inside.parents):
            yield _of_group(top / each, names)


def _of_group(group: Path, names: _Names) -> int | None:
    try:
        limit = int((group / names.limit).read_text())  # v2 says "max" where there is none
        usage = int((group / names.usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - usage + int(stat.get(names.inactive_file, 0))
    except (OSError, ValueError):
        return None
