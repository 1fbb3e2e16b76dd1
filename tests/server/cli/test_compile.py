"""`octavo compile` leaves nothing for a later start to compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.engine.replicas.shares import own_cores
from octavo.server.cli.main import main

SMALL = "--max-num-seqs 4 --max-num-batched-tokens 32 --max-model-len 128 --num-kv-pages 40"


def compile_command(model: Path) -> list[str]:
    return ["compile", "--model", str(model), *SMALL.split()]


def test_a_second_start_compiles_nothing(tiny_model, tmp_path):
    # A cache of their own: what JAX's had already would not be left ready to load.
    environ = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    command = compile_command(tiny_model)
    program = "import sys; from octavo.server.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *command],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    first, *_, last = done.stdout.splitlines()
    text = done.stdout
    assert first.split()[0] == "1/3"
    assert "mixed 32 general" in text
    assert " programs compiled, " in last

    # Another process, with the same arguments: whatever it asks for is there, and no step of it
    # is even traced.
    program = (
        "import sys; from octavo.server.cli.main import main;"
        "from octavo.engine.execution.executor import DeviceExecutor;"
        "DeviceExecutor._lower = None; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command, "--for", "serve", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["num_compiled"] == 0
    assert report["num_from_cache"] > len(report["programs"])
    assert report["bytes"] > 0
    assert {p["program"] for p in report["programs"]} == {
        "mixed 32 general",
        "decode 1 x 4 1 general",
        "decode 4 x 4 4 general",
    }
    assert all(p["from_cache"] and p["seconds"] > 0 for p in report["programs"])


@pytest.mark.skipif(len(own_cores()) < 2, reason="replicas want a core each")
def test_replicas_find_what_was_compiled_for_them(tiny_model, tmp_path):
    environ = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    arguments = ["--data-parallel-size", "2", "--for", "batch", "--for", "serve"]
    command = [*compile_command(tiny_model), *arguments]
    subprocess.run(
        [sys.executable, "-m", "octavo.server.cli.main", *command], check=True, env=environ
    )

    def entries() -> set[str]:
        return {path.name for path in tmp_path.rglob("*") if path.suffix in ("", ".program")}

    before = entries()
    assert any(name.endswith(".program") for name in before)
    program = (
        "import sys; from octavo import LLM;"
        "llm = LLM(sys.argv[1], progress=False, data_parallel_size=2, max_num_seqs=4,"
        " max_num_batched_tokens=32, max_model_len=128, num_kv_pages=40);"
        "llm.engine.wait_until_compiled(); llm.close()"
    )
    subprocess.run([sys.executable, "-c", program, str(tiny_model)], check=True, env=environ)
    assert entries() == before


def test_each_use_compiles_the_engines_that_it_would_build(tiny_model):
    from octavo.server.cli.compile import _configs

    arguments = {"model": str(tiny_model)}
    [serve] = _configs("serve", arguments)
    [batch] = _configs("batch", arguments)
    [few] = _configs("prompt", arguments)
    assert serve.warm_up == batch.warm_up == "full"
    assert batch.max_num_batched_tokens == 1024
    assert (few.warm_up, few.max_num_seqs) == ("few", serve.max_num_seqs)
    # What is given holds for every use.
    [batch] = _configs("batch", arguments | {"max_num_batched_tokens": 256})
    assert batch.max_num_batched_tokens == 256
    assert few.max_num_batched_tokens == 512
    [few] = _configs("prompt", arguments | {"max_num_seqs": 600})
    assert (few.max_num_seqs, few.max_num_batched_tokens) == (600, 600)


def test_without_a_cache_there_is_nothing_to_fill(tiny_model, capsys):
    import jax

    directory = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert main([*compile_command(tiny_model), "--compile-cache-dir", ""]) == 2
    finally:
        jax.config.update("jax_compilation_cache_dir", directory)
    assert "compile_cache_dir = '' is not allowed: a folder to fill" in capsys.readouterr().err


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 12_345_678_901])
def test_pool_sizes_are_coarse_and_little_smaller(num_bytes):
    from octavo.engine.execution.platform.kv_memory import coarsely

    kept = coarsely(num_bytes)
    assert 0.968 * num_bytes <= kept <= num_bytes
    assert coarsely(kept) == kept


@pytest.mark.parametrize("free", [3_000_000, 1_900_000_001, 1 << 30, (1 << 31) - 1])
def test_on_a_cpu_a_tenth_of_memory_less_mostly_changes_nothing(free):
    from octavo.engine.execution.platform.kv_memory import CPU_BUDGET_BITS, coarsely

    kept = coarsely(free, CPU_BUDGET_BITS)
    assert 0.66 * free <= kept <= free
    sizes = {coarsely(kept + kept * tenth // 100, CPU_BUDGET_BITS) for tenth in range(33)}
    assert sizes == {kept}
