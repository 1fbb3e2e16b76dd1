"""A compile cache that others could have written to is not used: its programs are run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.engine.execution.programs.trusted_folder import who_else_writes

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs owners of files")
STRANGER = 54321

PROGRAM = """
import sys
import jax, jax.numpy as jnp
if len(sys.argv) > 2:  # JAX was told by the environment, and has opened its cache
    jax.jit(lambda x: x * 3)(jnp.ones(3))
from octavo.engine.execution.programs.compile_cache import open_compile_cache
cache = open_compile_cache(sys.argv[1])
with cache.in_use():
    jax.jit(lambda x: x + 2)(jnp.ones(3))
print(cache.folder)
"""


def cache_in_use(folder: Path, **environ: str) -> tuple[str, str]:
    """The cache that a process uses which is given a folder, and what it logged."""
    told = {"JAX_COMPILATION_CACHE_DIR", "OCTAVO_TRUST_COMPILE_CACHE"}
    clean = {name: value for name, value in os.environ.items() if name not in told}
    more = ["told"] if "JAX_COMPILATION_CACHE_DIR" in environ else []
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *more], check=True, capture_output=True,
        text=True, env={**clean, "JAX_PLATFORMS": "cpu", **environ},
    )  # fmt: skip
    return done.stdout.strip(), done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a" / "cache"
    made.mkdir(parents=True, mode=0o755)
    made.chmod(0o755)
    made.parent.chmod(0o755)
    return made


def test_a_new_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    made = tmp_path / "x" / "y"
    used, logged = cache_in_use(made)
    assert used == str(made)
    assert "no compile cache" not in logged
    assert [each.stat().st_mode & 0o777 for each in (made, made.parent)] == [0o700, 0o700]
    assert any(made.iterdir())


@pytest.mark.parametrize("told", [False, True])
def test_a_folder_that_everybody_may_write_to_is_left_alone(folder: Path, told: bool) -> None:
    folder.chmod(0o777)
    environ = {"JAX_COMPILATION_CACHE_DIR": str(folder)} if told else {}
    environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    used, logged = cache_in_use(folder, **environ)
    assert used == "None"
    assert f"no compile cache: everybody may write to {folder}" in logged
    assert sum("lambda" in each.name for each in folder.iterdir()) <= told  # no second program


def test_an_operator_may_say_that_there_is_nobody_else(folder: Path) -> None:
    folder.chmod(0o777)
    used, logged = cache_in_use(folder, OCTAVO_TRUST_COMPILE_CACHE="1")
    assert used == str(folder)
    assert "no compile cache" not in logged


class TestWhoElseWrites:
    def test_nobody(self, folder: Path) -> None:
        (folder / "octavo-programs").mkdir()
        (folder / "octavo-programs" / "entry").touch()
        assert who_else_writes(folder) is None

    @pytest.mark.parametrize("mode", [0o777, 0o1777, 0o773])
    def test_everybody_into_the_folder(self, folder: Path, mode: int) -> None:
        folder.chmod(mode)
        assert who_else_writes(folder) == f"everybody may write to {folder}"

    def test_everybody_into_a_folder_above_it(self, folder: Path) -> None:
        folder.parent.chmod(0o777)
        assert who_else_writes(folder) == f"everybody may write to {folder.parent}"

    def test_a_sticky_folder_above_it_lets_owners_alone_rename(self, folder: Path) -> None:
        folder.parent.chmod(0o1777)
        assert who_else_writes(folder) is None

    @pytest.mark.parametrize("kind", ["folder", "file"])
    def test_everybody_into_what_lies_in_it(self, folder: Path, kind: str) -> None:
        inner = folder / "octavo-programs"
        inner.mkdir()
        entry = inner / "entry"
        entry.touch()
        (inner if kind == "folder" else entry).chmod(0o777)
        assert "everybody may write to" in str(who_else_writes(folder))

    def test_a_link_to_a_folder_that_everybody_may_write_to(self, folder: Path) -> None:
        folder.chmod(0o777)
        link = folder.parent / "link"
        link.symlink_to(Path("..") / "a" / "cache")
        assert who_else_writes(link) == f"everybody may write to {folder}"

    def test_a_link_in_a_folder_that_everybody_may_write_to(
        self, folder: Path, tmp_path: Path
    ) -> None:
        open_to_all = tmp_path / "open"
        open_to_all.mkdir()
        (open_to_all / "link").symlink_to(folder)
        open_to_all.chmod(0o777)
        assert who_else_writes(open_to_all / "link") == f"everybody may write to {open_to_all}"
        open_to_all.chmod(0o1777)
        assert who_else_writes(open_to_all / "link") is None

    def test_a_circle_of_links(self, tmp_path: Path) -> None:
        (tmp_path / "circle").symlink_to("circle")
        with pytest.raises(OSError, match="too many symbolic links"):
            who_else_writes(tmp_path / "circle")

    @pytest.mark.skipif("os.geteuid() != 0", reason="only root gives files away")
    @pytest.mark.parametrize("what", ["folder", "parent", "entry", "link"])
    def test_what_belongs_to_another_user(self, folder: Path, what: str) -> None:
        entry = folder / "entry"
        entry.touch()
        link = folder.parent / "link"
        link.symlink_to(folder)
        given = {"folder": folder, "parent": folder.parent, "entry": entry, "link": link}[what]
        os.chown(given, STRANGER, -1, follow_symlinks=False)
        why = who_else_writes(link if what == "link" else folder)
        assert str(STRANGER) in str(why)
        assert str(given) in str(why)

    @pytest.mark.skipif("os.geteuid() != 0", reason="only root gives files away")
    def test_a_group_that_may_write(self, folder: Path) -> None:
        folder.chmod(0o775)
        assert who_else_writes(folder) is None  # root's own group
        os.chown(folder, -1, STRANGER)
        assert who_else_writes(folder) == f"group {STRANGER} may write to {folder}"
