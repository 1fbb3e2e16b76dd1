"""What every test stands on: the CPU, several devices, a cache of its own, bounded examples."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Before JAX is imported anywhere.
os.environ["JAX_PLATFORMS"] = os.environ.get("OCTAVO_TEST_PLATFORM", "cpu")
# Four CPU devices, for tensor parallelism (an engine takes the first unless told otherwise), and
# machine code that compiles in half the time: tests run little of it.
for _flag in (
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
):
    if _flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()

# Compiled programs never land in the user's cache. OCTAVO_TEST_CACHE names a folder to keep them
# in between runs; without it they last as long as the session. Child processes inherit all this,
# and xdist's workers too: what one of them compiled the others load.
_scratch: tempfile.TemporaryDirectory[str] | None = None
if _cache := os.environ.get("OCTAVO_TEST_CACHE"):
    _cache = str(Path(_cache).resolve())
else:
    _scratch = tempfile.TemporaryDirectory(prefix="octavo-test-cache-")
    _cache = _scratch.name
os.environ["OCTAVO_TEST_CACHE"] = _cache
os.environ["XDG_CACHE_HOME"] = _cache
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(_cache) / "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

MOST_MAPPINGS = 30_000
"""Of memory, of this process. A program that XLA loads on a CPU takes twelve; where a process
has 65,530, Linux's default, the next load crashes it."""

hypothesis.settings.register_profile(
    "ci", max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile(
    "soak", max_examples=4000, stateful_step_count=150, deadline=None, print_blob=True
)
hypothesis.settings.load_profile("ci")


def pytest_sessionfinish() -> None:
    if _scratch is not None:
        _scratch.cleanup()


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """After a module, if many are loaded, lets go of the programs that JAX keeps."""
    yield
    mappings = Path("/proc/self/maps")
    if "jax" not in sys.modules or not mappings.exists():
        return
    with mappings.open("rb") as lines:
        num_mappings = sum(1 for _ in lines)
    if num_mappings > MOST_MAPPINGS:
        sys.modules["jax"].clear_caches()
        gc.collect()
