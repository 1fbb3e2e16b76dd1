"""The package's face and the mapping of the top-level folders into one namespace."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import octavo

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("engine", "models", "pallas_kernels", "server", "sharding")


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def in_fresh_process(code: str) -> str:
    """What `code` prints in a Python of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT / "tests"
    )
    return done.stdout.strip()


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_is_a_relative_link_into_the_namespace(folder: str) -> None:
    link = ROOT / "src" / "octavo" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / folder
    assert link.resolve() == ROOT / folder


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_imports_under_the_one_namespace(folder: str) -> None:
    module = importlib.import_module(f"octavo.{folder}")
    assert Path(module.__path__[0]).resolve() == ROOT / folder
    assert module.__path__[0].startswith(str(ROOT / "src"))


def test_every_folder_of_code_is_a_package() -> None:
    missing = {
        str(source.parent.relative_to(ROOT))
        for folder in FOLDERS
        for source in (ROOT / folder).rglob("*.py")
        if not (source.parent / "__init__.py").exists()
    }
    assert not missing, "setuptools would leave these out of the wheel"


def test_simulations_and_model_configurations_load_no_jax() -> None:
    modules = "octavo.engine.simulation.roofline, octavo.models.config"
    assert in_fresh_process(f"import sys, {modules}; print('jax' in sys.modules)") == "False"


def test_importing_octavo_loads_no_jax() -> None:
    heavy = ("jax", "jaxlib", "flax", "transformers", "numpy", "grpc")
    loaded = in_fresh_process(
        f"import sys, octavo; print([name for name in {heavy} if name in sys.modules])"
    )
    assert loaded == "[]"


def test_request_types_and_errors_load_no_jax() -> None:
    loaded = in_fresh_process(
        "import sys; from octavo import EngineConfig, OctavoError, RequestOutput, SamplingParams; "
        "print('jax' in sys.modules)"
    )
    assert loaded == "False"


def test_every_public_name_loads() -> None:
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    assert set(octavo.__all__) <= set(dir(octavo))


def test_every_error_of_the_tree_is_public() -> None:
    errors = importlib.import_module("octavo.engine.errors")
    tree = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OctavoError)
    }
    assert tree <= set(octavo.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        octavo.Llm  # noqa: B018


def test_version_is_the_one_that_is_packaged() -> None:
    assert pyproject()["project"]["version"] == octavo.__version__


def test_demo_extra_names_a_model_that_make_installs() -> None:
    pinned = (ROOT / "requirements-models.txt").read_text(encoding="utf-8").splitlines()
    for requirement in pyproject()["project"]["optional-dependencies"]["demo"]:
        assert requirement in pinned


def test_constraints_hold_versions_alone() -> None:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        requirement = line.partition(" ; ")[0]
        name, equals, version = requirement.partition("==")
        assert equals, line
        assert name.replace("-", "").isalnum(), line
        assert version.replace(".", "").isalnum(), line


def test_constraints_pin_the_oldest_jax_for_the_oldest_python() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert "jax==0.10.2 ; python_full_version < '3.12'" in lines


def test_every_room_without_jax_is_held_to_it() -> None:
    contracts = pyproject()["tool"]["importlinter"]["contracts"]
    held = {module for c in contracts for module in c.get("source_modules", ())}
    for room in ("scheduler", "kv", "simulation"):
        if (ROOT / "engine" / room).is_dir():
            assert f"octavo.engine.{room}" in held
