"""What decides, besides the program, what a compiler makes: the key's other half.

Two starts with the same fingerprint and source digest trace the same text and compile it for the
same device. The fingerprint holds the versions of what traces and compiles, JAX's settings, the
compiler's flags, tuning tables, the devices, and on a CPU its instruction sets and cores.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.compat import jax_settings

PACKAGES = ("sharding", "pallas_kernels", "models", "engine")
"""Folders whose source a step is traced from, tables of theirs included."""
LIBRARIES = ("jax", "jaxlib", "numpy", "flax", "ml_dtypes")
SUFFIXES = (".py", ".json")
FLAGS = ("XLA_", "LIBTPU_", "TPU_MEGACORE", "TF_XLA", "TF_GPU", "TF_ENABLE", "NVIDIA_TF32")
"""Beginnings of environment variables that compilers read; JAX's own are among its settings."""
WHEREABOUTS = (
    "jax_compilation_cache",
    "jax_persistent_cache",
    "jax_enable_compilation_cache",
    "jax_raise_persistent",
    "jax_explain_cache",
    "jax_log",
    "jax_debug_log",
    "jax_dump",
    "jax_traceback",
)
"""Beginnings of settings that say where things are kept and what is told."""
DEVICE_FIELDS = ("id", "device_kind", "compute_capability", "core_count", "coords", "core_on_chip")


def fingerprint(mesh: Mesh) -> str:
    """The fingerprint of this process and the devices of `mesh`."""
    device = mesh.devices.flat[0]
    host: list[Any] = [sys.platform, platform.machine()]
    if device.platform == "cpu":
        host += [_cpu_features(), tuning.num_cores()]
    about = {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "platform": [device.platform, device.client.platform_version],
        "devices": [
            {name: str(getattr(each, name, None)) for name in DEVICE_FIELDS}
            for each in mesh.devices.flat
        ],
        "mesh": [list(mesh.axis_names), list(mesh.devices.shape), str(mesh)],
        "settings": {
            name: str(value)
            for name, value in jax_settings().items()
            if not name.startswith(WHEREABOUTS)
        },
        "flags": {name: value for name, value in os.environ.items() if name.startswith(FLAGS)},
        "tuning": [
            tuning.tuning_device(),
            *(file_digest(folder.glob("*.json")) for folder in tuning.directories()),
        ],
        "host": host,
    }
    return json.dumps(about, sort_keys=True)


@functools.lru_cache(maxsize=4)
def source_digest(folders: tuple[Path, ...]) -> str | None:
    """Of the names and contents of all source files in `folders`; None if one has none."""
    files = [[*_source_files(folder)] for folder in folders]
    return file_digest(path for found in files for path in found) if all(files) else None


def file_digest(paths: Iterable[Path]) -> str:
    """Of names and contents, in whatever order they are given; those that vanish count as empty."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        try:
            data = path.read_bytes()
        except OSError:
            data = b""
        digest.update(f"{path.parent.name}/{path.name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def traced_folders() -> tuple[Path, ...]:
    """Where the source lies that steps are traced from."""
    return tuple(map(_folder, PACKAGES))


def _folder(package: str) -> Path:
    file = importlib.import_module(f"octavo.{package}").__file__
    return Path(file or "/nonexistent").parent


def _source_files(folder: Path) -> Iterable[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names if name.endswith(SUFFIXES))


def _version(name: str) -> Any:
    return getattr(sys.modules.get(name), "__version__", None)


@functools.cache
def _cpu_features() -> str:
    """Instruction sets, as the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in lines if line.startswith(names)}))
