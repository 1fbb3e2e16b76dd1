"""What a model must be, and random weights of one whose weights are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.models.loading.load import load_model, open_model, save_model
from octavo.models.loading.locate import locate
from octavo.models.quantization import quantized_weights
from octavo.models.random_weights import random_weights
from octavo.sharding.mesh import make_mesh


@pytest.fixture
def bare(tmp_path: Path, tiny_values: Any) -> Any:
    """Name -> a directory of its config.json alone."""

    def make(name: str, **changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(tiny_values(name) | changes))
        return tmp_path

    return make


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_weights_that_are_not_there_are_drawn(
    name: str, quantization: str | None, bare: Any
) -> None:
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    directory, mesh = bare(name, quantization_config=how), make_mesh(2)
    model = open_model(directory, "bfloat16", mesh, quantization, load_format="dummy", seed=3)
    weights = model.read_weights()
    want = random_weights(model.config, "bfloat16", mesh, 3)
    if quantization == "int8":
        want = quantized_weights(want, model.config, "int8", mesh)
    jax.tree.map(np.testing.assert_array_equal, weights, want)

    def check(found: jax.Array, announced: jax.ShapeDtypeStruct) -> None:
        assert (found.shape, found.dtype) == (announced.shape, announced.dtype)
        assert found.sharding == announced.sharding

    jax.tree.map(check, weights, model.abstract_weights())
    other = open_model(directory, "bfloat16", mesh, quantization, load_format="dummy", seed=4)
    embed = [tree["embed"].astype(jnp.float32) for tree in (weights, other.read_weights())]
    assert not np.array_equal(*embed)


def test_any_kind_of_checkpoint_says_the_shapes(
    tiny_gguf: Any, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    loaded = load_model(tiny_checkpoint("llama"))
    save_model(loaded, tmp_path / "saved")
    for source in (tiny_gguf("llama"), tiny_checkpoint("llama"), tmp_path / "saved"):
        found = open_model(source, load_format="dummy")
        assert found.kind == locate(source)[1]
        assert found.config.layers == loaded.config.layers
        embed = found.read_weights()["embed"]
        assert embed.shape == loaded.weights["embed"].shape
        assert not np.array_equal(embed, loaded.weights["embed"])


def test_a_kind_that_is_named_is_the_only_one_that_is_read(
    tiny_gguf: Any, tiny_checkpoint: Any
) -> None:
    sources = {"gguf": tiny_gguf("llama"), "safetensors": tiny_checkpoint("llama")}
    for kind, source in sources.items():
        for named in ("auto", kind):
            assert open_model(source, load_format=named).kind == kind
        for named in {"gguf", "safetensors", "orbax"} - {kind}:
            with pytest.raises(InvalidConfigError, match=f"auto or {kind}, which .* is"):
                open_model(source, load_format=named)
