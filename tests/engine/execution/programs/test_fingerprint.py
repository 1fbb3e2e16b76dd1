"""A fingerprint changes with whatever changes a program, and with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from octavo.engine.execution.programs.fingerprint import fingerprint, source_digest
from octavo.sharding.mesh import make_mesh


def digest(*folders: Path) -> str | None:
    return source_digest.__wrapped__(folders)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "step.py").write_text("x = 1\n")
    (tmp_path / "package" / "inner" / "table.json").write_text("{}")
    return tmp_path / "package"


@pytest.mark.parametrize(
    "change",
    [
        lambda package: (package / "step.py").write_text("x = 2\n"),
        lambda package: (package / "inner" / "table.json").write_text("[]"),
        lambda package: (package / "new.py").write_text(""),
        lambda package: (package / "step.py").rename(package / "stop.py"),
        lambda package: (package / "__init__.py").unlink(),
        lambda package: (package / "step.py").replace(package / "inner" / "step.py"),
    ],
    ids=["code", "table", "new file", "name", "file gone", "moved"],
)
def test_any_change_of_the_source_changes_it(
    package: Path, change: Callable[[Path], object]
) -> None:
    before = digest(package)
    assert digest(package) == before
    change(package)
    assert digest(package) != before


def test_what_is_no_source_does_not_count(package: Path) -> None:
    before = digest(package)
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "step.cpython-313.pyc").write_bytes(b"code")
    (package / "notes.md").write_text("notes")
    assert digest(package) == before


def test_without_source_there_is_none(package: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert digest(package, tmp_path / "empty") is None


def test_settings_flags_devices_and_tuning_change_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCTAVO_TUNING_DIR", str(tmp_path))
    mesh = make_mesh(1)
    found = {fingerprint(mesh)}
    assert fingerprint(mesh) in found

    def is_new() -> bool:
        before = len(found)
        found.add(fingerprint(mesh))
        return len(found) > before

    with jax.default_matmul_precision("highest"):
        assert is_new()
    assert not is_new()
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        assert is_new()
    assert not is_new()
    (tmp_path / "here.json").write_text("{}")
    assert is_new()
    if len(jax.devices()) > 1:
        mesh = make_mesh(2)
        assert is_new()


def test_where_the_cache_lies_does_not(tmp_path: Path) -> None:
    mesh, folder = make_mesh(1), jax.config.jax_compilation_cache_dir
    before = fingerprint(mesh)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        assert fingerprint(mesh) == before
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
