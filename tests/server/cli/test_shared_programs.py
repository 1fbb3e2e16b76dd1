"""What one command left, another finds: none compiles a program for a few tokens of its own."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.execution.executor import DeviceExecutor
from octavo.engine.execution.programs.compile_cache import CompileCache
from octavo.server.cli.generate import MANY_ROWS, sized_for
from octavo.server.cli.main import main

# Of nobody else's: what JAX's own cache has is not left ready to load.
SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "max_model_len": 240}
SIZES |= {"num_kv_pages": 61, "block_size": 16}
BEGIN = ["--quiet", "--max-tokens", "3", "--ignore-eos"]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Shapes that engines traced, with a store of the test's own and no other cache."""
    names: list[str] = []
    lower = DeviceExecutor._lower

    def noting(self: DeviceExecutor, shape: Any) -> Any:
        names.append(str(shape))
        return lower(self, shape)

    monkeypatch.setattr(DeviceExecutor, "_lower", noting)
    monkeypatch.setattr(CompileCache, "folder", property(lambda self: tmp_path / "cache"))
    before = jax.config.jax_persistent_cache_min_entry_size_bytes
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 1 << 40)
    yield names
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", before)


@pytest.fixture
def commands(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Callable[[], None]]:
    options = ["--model", str(tiny_model)]
    for name, value in SIZES.items():
        options += [f"--{name.replace('_', '-')}", str(value)]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": text}) for text in ("ab", "c", "de")) + "\n")

    def run(*words: str) -> None:
        assert main([*words, *options]) == 0

    def chat() -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/exit\n"))
        run("chat", *BEGIN)

    def serve() -> None:  # only just ready, and ended
        sizes: dict[str, Any] = SIZES
        Engine(EngineConfig(model=str(tiny_model), **sizes)).close()

    batch = ["generate", *BEGIN, "--input", str(source), "--output", str(tmp_path / "out.jsonl")]
    return {
        "one prompt": lambda: run("generate", "ab", *BEGIN),
        "demo": lambda: run("generate", "ab", "c", "a b c", "d" * 40, *BEGIN),
        "chat": chat,
        "batch": lambda: run(*batch, "--overwrite"),
        "serve": serve,
    }


FEW = ("one prompt", "demo", "chat", "batch")


@pytest.mark.parametrize("first", ["one prompt", "batch", "serve"])
def test_a_few_tokens_compile_nothing_after_another_command(
    first: str, commands: dict[str, Callable[[], None]], lowered: list[str]
) -> None:
    commands[first]()
    assert lowered, "the store was empty"
    lowered.clear()
    for name in FEW:
        commands[name]()
        assert (name, lowered) == (name, [])


def test_a_handful_is_of_a_size_with_serve(tiny_model: Path) -> None:
    serve = EngineConfig(model=str(tiny_model)).with_token_budget(512)
    for num_rows, given in itertools.product(
        (1, 8, 9, MANY_ROWS), ({}, {"max_num_seqs": 600}, {"max_num_seqs": 4})
    ):
        sized = EngineConfig(**sized_for(num_rows, given))
        wanted = (
            serve.replace(**given)
            if "max_num_seqs" not in given
            else EngineConfig(**given).with_token_budget(512)
        )
        assert sized.max_num_seqs == wanted.max_num_seqs
        assert sized.max_num_batched_tokens == wanted.max_num_batched_tokens
        assert sized.warm_up == ("few" if num_rows <= 8 else "early")
    assert sized_for(MANY_ROWS + 1, {}) == {}
    assert sized_for(1, {"warm_up": "full"})["warm_up"] == "full"
