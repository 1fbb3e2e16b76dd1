"""A quantized checkpoint says what its numbers say, in programs that read blocks of codes, too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.engine.test_greedy_invariance import tokens
from tests.models.loading.stored.writers import FORMATS, quantized, write_safetensors


@pytest.mark.parametrize(("name", "has_blocks"), [("awq", True), ("nf4", False)])
def test_greedy_tokens_are_those_of_the_numbers_that_are_stored(
    name: str, has_blocks: bool, tiny_model: Path, tmp_path: Path, make_llm: Callable[..., Any]
) -> None:
    stored, dense = quantized(name, load_file(tiny_model / "model.safetensors"))
    for kind, tensors in (("stored", stored), ("dense", dense)):
        directory = tmp_path / kind
        shutil.copytree(tiny_model, directory)
        write_safetensors(directory / "model.safetensors", tensors)
    values = json.loads((tiny_model / "config.json").read_text())
    values |= {"quantization_config": FORMATS[name][0]}
    (tmp_path / "stored" / "config.json").write_text(json.dumps(values))
    want = tokens(make_llm(model=str(tmp_path / "dense")))
    llm = make_llm(model=str(tmp_path / "stored"), warm_up="full")
    shapes = llm.engine.executor.lattice.fine + llm.engine.executor.lattice.coarse
    assert any(shape.block_quantized for shape in shapes) == has_blocks
    assert tokens(llm) == want
