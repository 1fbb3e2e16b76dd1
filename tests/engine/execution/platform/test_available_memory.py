"""What a host has left counts its container's limit, and what files' pages could give back."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.engine.execution.platform import available_memory
from octavo.engine.execution.platform.available_memory import PROGRAM_BYTES, available_memory_bytes

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "proc/meminfo", f"MemFree: 100 kB\nMemAvailable: {20 << 20} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def limit_v2(group: Path, limit: str) -> None:
    write(group / "memory.max", f"{limit}\n")
    write(group / "memory.current", f"{3 * GIB}\n")
    write(group / "memory.stat", f"anon {GIB}\ninactive_file {GIB}\n")


def test_pages_of_files_are_available(root: Path) -> None:
    assert available_memory_bytes(root) == 20 * GIB


def test_this_machine_says() -> None:
    available = available_memory_bytes()
    assert available is not None
    assert available > 0


def test_a_containers_limit_holds(root: Path) -> None:
    limit_v2(root / "sys/fs/cgroup", str(8 * GIB))
    assert available_memory_bytes(root) == 6 * GIB


def test_the_tightest_group_above_holds(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/pods/one/server\n")
    limit_v2(root / "sys/fs/cgroup/pods/one/server", "max")
    limit_v2(root / "sys/fs/cgroup/pods/one", str(5 * GIB))
    limit_v2(root / "sys/fs/cgroup/pods", str(9 * GIB))
    assert available_memory_bytes(root) == 3 * GIB


def test_a_group_past_its_limit_leaves_nothing(root: Path) -> None:
    limit_v2(root / "sys/fs/cgroup", str(GIB))
    assert available_memory_bytes(root) == 0


@pytest.mark.parametrize("seen", ["", "docker/abc"], ids=["container", "host"])
def test_groups_of_the_first_version(root: Path, seen: str) -> None:
    write(root / "proc/self/cgroup", "5:cpuacct,cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    group = root / "sys/fs/cgroup/memory" / seen
    write(group / "memory.limit_in_bytes", f"{8 * GIB}\n")
    write(group / "memory.usage_in_bytes", f"{3 * GIB}\n")
    write(group / "memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}\n")
    assert available_memory_bytes(root) == 6 * GIB


def test_a_host_without_these_files_asks_the_system(tmp_path: Path) -> None:
    available = available_memory_bytes(tmp_path)
    assert available is None or available > 0


@pytest.mark.parametrize(
    ("available", "is_room"), [(None, True), (PROGRAM_BYTES, True), (PROGRAM_BYTES - 1, False)]
)
def test_programs_want_memory_that_is_left(monkeypatch, available, is_room) -> None:
    monkeypatch.setattr(available_memory, "available_memory_bytes", lambda: available)
    assert available_memory.has_room_for_programs() is is_room
