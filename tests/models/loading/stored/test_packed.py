"""Weights that stay in their checkpoint's blocks are the numbers that a dense load makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.models.loading.load import load_model, open_model
from octavo.models.parameters import declare, is_spec
from octavo.pallas_kernels.packed_linear import PackedWeight
from octavo.sharding.mesh import make_mesh
from tests.models.loading.stored.writers import FORMATS, quantized, stores_blocks

MODELS = ("llama", "qwen3_moe", "gemma3", "phi3", "qwen3_next", "deepseek_v2", "falcon_h1")
"""With experts, a KV head that two devices share, fused tensors, recurrent and latent layers."""


def is_packed(node: object) -> bool:
    return isinstance(node, PackedWeight)


def check(path: Path, devices: int, dtype: str) -> set[str]:
    """Compares the checkpoint's weights with those of a dense load; the names of packed ones."""
    dense = load_model(path, dtype, make_mesh(devices))
    opened = open_model(path, dtype, make_mesh(devices), "stored")
    weights, abstract = opened.read_weights(), opened.abstract_weights()
    assert jax.tree.structure(weights) == jax.tree.structure(abstract)
    for array, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
        assert array.sharding.is_equivalent_to(wanted.sharding, array.ndim)
    packed = set()

    def compare(keys: Any, spec: Any, want: jax.Array, found: Any) -> None:
        if is_packed(found):
            packed.add(str(keys[-1].key))
            found = found.dequantized()
            stacked = spec.num_stacked
            if spec.num_inputs is not None:
                order = range(stacked + spec.num_inputs, len(spec.shape))
                inputs = range(stacked, stacked + spec.num_inputs)
                want = want.transpose(*range(stacked), *order, *inputs)
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want))

    specs = declare(opened.config, opened.dtype)
    jax.tree.map_with_path(compare, specs, dense.weights, weights, is_leaf=is_spec)
    return packed


@pytest.mark.parametrize(
    ("name", "model", "devices", "dtype"),
    [
        *((name, "llama", 1, "float32") for name in FORMATS),
        *(("packed 4 bits by group", model, 2, "float32") for model in MODELS),
        ("awq", "qwen3_moe", 1, "bfloat16"),
        ("awq", "llama", 2, "bfloat16"),
    ],
)
def test_packed_weights_are_the_dense_ones(
    name: str, model: str, devices: int, dtype: str, write: Any, tiny_tensors: Any
) -> None:
    stored, _ = quantized(name, tiny_tensors(model))
    path = write(model, stored, FORMATS[name][0])
    if not stores_blocks(name):
        with pytest.raises(InvalidConfigError, match=r"quantization = 'stored'.*blocks"):
            check(path, devices, dtype)
        return
    packed = check(path, devices, dtype)
    assert packed, "no layer is packed"
    assert model != "llama" or packed >= {"wqkv", "wo", "w_gate_up"}
    assert model != "qwen3_moe" or packed >= {"experts_gate", "experts_up", "experts_down"}


@pytest.mark.parametrize("devices", [1, 2])
def test_packed_weights_of_a_gguf_are_the_dense_ones(devices: int, tiny_gguf: Any) -> None:
    path = tiny_gguf("phi4_long", kind=gguf.GGMLQuantizationType.Q8_0)
    assert check(path, devices, "float32") >= {"wqkv", "wo", "w_gate_up"}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_what_has_no_blocks_is_refused(
    load_format: str, tiny_gguf: Any, tiny_checkpoint: Any
) -> None:
    for path in (tiny_gguf("llama"), tiny_checkpoint("llama")):
        with pytest.raises(InvalidConfigError, match="quantization = 'stored'"):
            open_model(path, quantization="stored", load_format=load_format)
