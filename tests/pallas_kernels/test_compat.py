"""What `compat` asks of JAX and XLA has its effect, is asked nowhere else, and may be lacking."""

from __future__ import annotations

import ast
import os
import pickle
import pickletools
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import octavo
from octavo.engine.execution.programs.light_program import _varint
from octavo.engine.execution.programs.xla_messages import CompilationResult
from octavo.pallas_kernels import compat

ROOT = Path(octavo.__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "engine", "models", "pallas_kernels", "server", "sharding", "src", "tools")
PRIVATE = re.compile(
    r"jax\.(experimental|_src|interpreters|extend|ffi|lib)\b|jaxlib\b|jax\.experimental$"
)
PALLAS = "jax.experimental.pallas"
FLAG = re.compile(
    r"(-*xla_\w+(=\S*)?\s*)+|XLA_FLAGS|LIBTPU_INIT_ARGS"
    r"|jax\.(experimental|_src|interpreters|extend)\.[\w.]+"
)
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="of CPUs' programs")


def private_uses(source: str, *, is_kernel: bool = False) -> list[str]:
    """Imports of what may change without notice, and names of XLA's flags and attributes."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        match node:
            case ast.Import():
                names = [each.name for each in node.names]
            case ast.ImportFrom(module=module) if module is not None:
                names = [f"{module}.{each.name}" for each in node.names]
            case ast.Attribute():
                names = [ast.unparse(node)]
            case ast.Constant(value=str(text)) if FLAG.fullmatch(text):
                found.append(text)
            case ast.keyword(arg=str(name)) if name.startswith("xla_"):
                found.append(name)
        found += [
            name
            for name in names
            if PRIVATE.match(name) and not (is_kernel and name.startswith(PALLAS))
        ]
    return found


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path.relative_to(ROOT)


def test_what_may_change_without_notice_is_used_in_compat_alone() -> None:
    uses = {}
    for path in sources():
        is_kernel = path.parts[0] == "pallas_kernels"
        found = private_uses((ROOT / path).read_text(), is_kernel=is_kernel)
        if found and path != Path("pallas_kernels/compat.py"):
            uses[str(path)] = found
    assert uses == {}
    assert len(private_uses((ROOT / "pallas_kernels/compat.py").read_text())) > 5


@pytest.mark.parametrize(
    "source",
    [
        "from jax.experimental import layout",
        "from jax.experimental.pallas import tpu",
        "import jax._src.config as c",
        "import jaxlib",
        "from jax import numpy\nx = jax.experimental.shard_map",
        "from jax.extend.backend import backends",
        "from jax.interpreters import mlir",
        "jax.ffi.ffi_call('x')",
        "options = {'xla_cpu_prefer_vector_width': '512'}",
        "os.environ['XLA_FLAGS'] = '--xla_dump_to=/tmp'",
        "mark(xla_cpu_small_call='true')",
        "importlib.import_module('jax._src.config')",
    ],
)
def test_each_way_of_using_it_is_found(source: str) -> None:
    assert private_uses(source)


@pytest.mark.parametrize(
    "source",
    ["import jax.numpy", "from jax import monitoring", "backend = 'xla'", "'On xla_cpu: slow.'"],
)
def test_what_jax_promises_is_not(source: str) -> None:
    assert not private_uses(source)
    assert not private_uses("from jax.experimental.pallas import tpu", is_kernel=True)


class TestSettingsOfAThread:
    def test_they_are_the_threads_and_end(self) -> None:
        name, before, seen = "jax_log_compiles", jax.config.jax_log_compiles, []
        with compat.settings_of_this_thread({name: not before}):
            assert jax.config.jax_log_compiles is (not before)
            assert compat.jax_settings()[name] is (not before)
            other = threading.Thread(target=lambda: seen.append(jax.config.jax_log_compiles))
            other.start()
            other.join()
        assert seen == [before]
        assert jax.config.jax_log_compiles is before

    def test_without_them_the_process_keeps_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compat, "_config", None)
        before = jax.config.jax_log_compiles
        with compat.settings_of_this_thread({"jax_log_compiles": not before}):
            assert jax.config.jax_log_compiles is before

    def test_a_cache_that_is_closed_opens_elsewhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings: dict[str, Any] = {
            "jax_persistent_cache_min_compile_time_secs": 0.0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
        }
        try:
            for folder in ("one", "two"):
                settings["jax_compilation_cache_dir"] = str(tmp_path / folder)
                compat.close_compilation_cache()
                with compat.settings_of_this_thread(settings):
                    jax.jit(lambda x, folder=folder: x + len(folder)).lower(1.0).compile()
                assert any((tmp_path / folder).iterdir())
        finally:
            compat.close_compilation_cache()
        monkeypatch.setattr(compat, "_cache", None)
        compat.close_compilation_cache()


class TestMemoryOrder:
    def test_arrays_lie_as_they_are_told(self) -> None:
        array = jnp.arange(24.0).reshape(2, 3, 4)
        placement = compat.in_memory_order(array.sharding, (1, 2, 0))
        assert compat.has_memory_order(placement)
        assert not compat.has_memory_order(array.sharding)
        placed = jax.device_put(array, placement)
        assert placed.format.layout.major_to_minor == (1, 2, 0)
        np.testing.assert_array_equal(placed, array)

    @on_cpu
    def test_a_program_keeps_to_it(self) -> None:
        def transposed(x: jax.Array, is_told: bool) -> jax.Array:
            x = x.T
            return (compat.laid_out_row_major(x) if is_told else x).sum(0) * 2

        x = jnp.arange(12.0).reshape(3, 4)
        texts = [
            jax.jit(transposed, static_argnums=1).lower(x, told).as_text() for told in (True, False)
        ]
        assert ["LayoutConstraint" in text for text in texts] == [True, False]
        np.testing.assert_array_equal(transposed(x, True), transposed(x, False))

    def test_without_it_devices_choose(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(compat, "_layout", None)
        x = jnp.arange(6.0).reshape(2, 3)
        assert compat.in_memory_order(x.sharding, (1, 0)) is x.sharding
        assert not compat.has_memory_order(x.sharding)
        assert compat.laid_out_row_major(x) is x


@jax.jit
def _loop(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 8, lambda i, y: y.at[i].set((x * w[i]).sum()), jnp.zeros(8))


def _one_function(x: jax.Array, w: jax.Array) -> jax.Array:
    with compat.as_one_function():
        return _loop(x, w)


def _fresh(function: Any, *args: jax.Array) -> Any:
    """Lowered, of a program that no cache has: what was loaded cannot be written down."""
    number = int.from_bytes(os.urandom(3))
    return jax.jit(lambda *args: function(*args) + number).lower(*args)


def _result(program: Any) -> bytes:
    """What XLA writes a CPU's program down as."""
    parts = compat.serialize_program(program)
    found = (value for op, value, _ in pickletools.genops(parts[0]) if op.name == "BINBYTES")
    data = max(found, key=len)
    size, at = _varint(data, 0)
    rest = data[at + size :]
    size, at = _varint(rest, 1)
    return rest[at : at + size]


def _num_kernels(function: Any, *args: jax.Array) -> int:
    """Functions and other commands that a CPU's program is made of."""
    result: Any = CompilationResult.FromString(_result(_fresh(function, *args).compile()))
    return len(result.thunk_sequence.thunks)


@on_cpu
class TestOneFunction:
    def test_loops_are_one_native_function(self) -> None:
        x, w = jnp.arange(64.0), jnp.arange(512.0).reshape(8, 64)
        # The second adds the number.
        assert _num_kernels(_one_function, x, w) <= 2 < _num_kernels(_loop, x, w)

    def test_without_it_they_compute_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, w = jnp.arange(64.0), jnp.arange(512.0).reshape(8, 64)
        expected = _one_function(x, w)
        monkeypatch.setattr(compat, "_metadata", None)
        np.testing.assert_array_equal(_one_function(x, w), expected)


@on_cpu
class TestCompilerOptions:
    @pytest.mark.parametrize(
        "options",
        [
            compat.WIDE_VECTORS,
            compat.product_compiler_options("eigen"),
            compat.graph_compiler_options(),
        ],
    )
    def test_xla_knows_those_of_cpus(self, options: dict[str, str]) -> None:
        jax.jit(lambda x: x + 1).lower(1.0).compile(options)

    def test_what_goes_into_graphs_is_the_users_to_say(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ((option, what),) = compat.graph_compiler_options().items()
        assert {"WHILE", "CONDITIONAL"} <= set(what.split(","))
        monkeypatch.setenv("XLA_FLAGS", f"--{option}= --xla_cpu_enable_fast_math=false")
        assert compat.graph_compiler_options() == {}

    def test_vectors_are_as_wide_as_asked_for(self) -> None:
        x = jnp.arange(4096.0)
        lowered = _fresh(lambda x: jnp.sqrt(x * 3 + 1) / (x + 2) - x, x)
        ((option, widest),) = compat.WIDE_VECTORS.items()
        has_widest = "avx512f" in Path("/proc/cpuinfo").read_text()
        widths = (widest, "256") if has_widest else ("256", "128")  # those that this CPU has
        optimized = {"xla_backend_optimization_level": "3"}  # tests are compiled without
        wide, narrow, again = (
            _code(lowered.compile({**optimized, option: each})) for each in (*widths, widths[0])
        )
        assert wide == again != narrow

    def test_an_option_that_xla_does_not_know_is_left_out(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        options = {"xla_cpu_of_yesterday": "1", **compat.WIDE_VECTORS}
        options["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_OF_YESTERDAY"
        program = compat.compile_lowered(jax.jit(lambda x: x + 1).lower(1.0), options)
        assert program(1.0) == 2.0
        assert "xla_cpu_of_yesterday" in caplog.text
        assert "ynn_fusion_type" in caplog.text
        assert "vector_width" not in caplog.text

    def test_other_errors_are_the_callers(self) -> None:
        class Failing:
            def compile(self, options: Any) -> Any:
                raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {options}")

        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            compat.compile_lowered(Failing(), compat.WIDE_VECTORS)


def _code(program: Any) -> bytes:
    """A program's machine code: the object files in what it is written down as."""
    result = _result(program)
    return result[result.index(b"\x7fELF") :]


SOLVES = """
import pickle, sys
import jax, numpy as np
from octavo.pallas_kernels.compat import deserialize_program
with open(sys.argv[1], "rb") as file:
    solve = deserialize_program(pickle.load(file), jax.devices()[:1])
print(np.asarray(solve(np.tril(np.full((3, 3), 2.0, np.float32)), np.ones((3, 1), np.float32)))[0])
"""


@on_cpu
def test_a_program_of_another_process_finds_lapack(tmp_path: Path) -> None:
    """JAX looks for it as it lowers a solver, which a process that only loads one never does."""
    # Compiled here: what JAX's cache gives back cannot be written down again.
    salt = float(random.randrange(2**20))
    solve = jax.jit(
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True) + salt
    )
    given = (jax.ShapeDtypeStruct((3, size), jnp.float32) for size in (3, 1))
    parts = compat.serialize_program(solve.lower(*given).compile())
    (tmp_path / "program").write_bytes(pickle.dumps(parts))
    done = subprocess.run(
        [sys.executable, "-c", SOLVES, str(tmp_path / "program")],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip()) == (0, str(np.float32([0.5 + salt]))), done.stderr
