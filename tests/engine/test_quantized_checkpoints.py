"""A quantized checkpoint says what its numbers say, in programs that read blocks of codes, too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.engine.conftest import write_tiny_model
from tests.engine.test_greedy_invariance import tokens
from tests.models.loading.stored.writers import FORMATS, quantized, write_safetensors


def write_both(name: str, model: Path, directory: Path) -> tuple[Path, Path]:
    """Writes a model in a format, and dense with the same numbers; both paths."""
    tensors = quantized(name, load_file(model / "model.safetensors"))
    paths = directory / "stored", directory / "dense"
    for path, kind in zip(paths, tensors, strict=True):
        shutil.copytree(model, path)
        write_safetensors(path / "model.safetensors", kind)
    values = json.loads((model / "config.json").read_text())
    values |= {"quantization_config": FORMATS[name][0]}
    (paths[0] / "config.json").write_text(json.dumps(values))
    return paths


@pytest.mark.parametrize(("name", "has_blocks"), [("awq", True), ("nf4", False)])
def test_greedy_tokens_are_those_of_the_numbers_that_are_stored(
    name: str, has_blocks: bool, tiny_model: Path, tmp_path: Path, make_llm: Callable[..., Any]
) -> None:
    stored, dense = write_both(name, tiny_model, tmp_path)
    want = tokens(make_llm(model=str(dense)))
    llm = make_llm(model=str(stored), warm_up="full")
    shapes = llm.engine.executor.lattice.fine + llm.engine.executor.lattice.coarse
    assert any(shape.block_quantized for shape in shapes) == has_blocks
    assert tokens(llm) == want


def test_experts_that_devices_cut_within_a_block_say_the_same(
    tmp_path: Path, make_llm: Callable[..., Any]
) -> None:
    """Six experts over four devices: each has a quarter of every one's 64 features, two blocks."""
    (tmp_path / "experts").mkdir()
    model = write_tiny_model(tmp_path / "experts", num_experts=6)
    stored, dense = write_both("mxfp4, compressed", model, tmp_path)
    want = tokens(make_llm(model=str(dense)))
    llm = make_llm(model=str(stored), quantization="stored", tensor_parallel_size=4)
    assert tokens(llm) == want
