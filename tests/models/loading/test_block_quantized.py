"""Block-quantized layers of the packaged models are the float32 weights, number for number."""

from __future__ import annotations

import gguf
import jax
import numpy as np
import pytest

from octavo.models.loading.load import open_model
from octavo.models.packaged import PACKAGED_MODELS
from octavo.models.quantization import NUM_INPUTS
from octavo.models.weight_variants.block_quantized import abstract_in_panels, in_panels
from octavo.models.weight_variants.tree import with_variants
from octavo.pallas_kernels.cpu.block_quantized_linear import (
    BlockQuantizedWeight,
    abstract_block_quantized,
    dequantized,
    lay_out_blocks,
)
from octavo.pallas_kernels.stored_blocks import Blocks, BlockType
from octavo.sharding.mesh import make_mesh


@pytest.fixture(params=sorted(PACKAGED_MODELS))
def packaged(request):
    if not PACKAGED_MODELS[request.param].is_installed():
        pytest.skip(f"{request.param} is not installed")
    return request.param


def test_blocks_are_the_weights(packaged):
    opened = open_model(packaged, "float32")
    weights, blocks = opened.read_weights(), opened.block_quantized.read()
    abstract = opened.block_quantized.abstract()
    assert jax.tree.structure(blocks) == jax.tree.structure(abstract)
    for array, wanted in zip(jax.tree.leaves(blocks), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
        assert array.sharding == wanted.sharding
    compared = 0
    for layer in (0, opened.config.num_layers - 1):
        assert blocks["layers"][layer].keys() == NUM_INPUTS.keys() & weights["layers"][layer].keys()
        for name, weight in blocks["layers"][layer].items():
            assert isinstance(weight, BlockQuantizedWeight)
            dense = np.asarray(weights["layers"][layer][name])
            inputs = NUM_INPUTS[name]
            dense = np.moveaxis(dense.reshape(-1, *dense.shape[inputs:]), 0, -1)
            np.testing.assert_array_equal(np.asarray(dequantized(weight)), dense)
            compared += 1
    assert compared == 8
    dense = weights["lm_head"].T if "lm_head" in weights else weights["embed"]
    np.testing.assert_array_equal(np.asarray(dequantized(blocks["lm_head"])), np.asarray(dense))


def test_blocks_of_fused_and_partly_rotated_tensors_are_the_weights(tiny_gguf):
    path = tiny_gguf("phi4_long", kind=gguf.GGMLQuantizationType.Q8_0)
    opened = open_model(path, "float32")
    weights, blocks = opened.read_weights()["layers"][1], opened.block_quantized.read()
    assert blocks["layers"][1].keys() == {"wqkv", "wo", "w_gate_up"}
    for name, weight in blocks["layers"][1].items():
        dense = np.asarray(weights[name])
        inputs = NUM_INPUTS[name]
        dense = np.moveaxis(dense.reshape(-1, *dense.shape[inputs:]), 0, -1)
        np.testing.assert_array_equal(np.asarray(dequantized(weight)), dense)


def test_panels_are_what_was_announced():
    kind = BlockType(
        codes=32, nibbles=True, scale_dtype=np.dtype("float16"), minimum_dtype=np.dtype("float16")
    )
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (80, 2, 16), dtype=np.uint8)
    scale, minimum = rng.standard_normal((2, 80, 2)).astype(np.float16)
    weight = lay_out_blocks(Blocks(type=kind, codes=codes, scale=scale, minimum=minimum), (80,))
    blocks = {"layers": ({"wo": jax.tree.map(jax.numpy.asarray, weight)}, {})}
    abstract = abstract_in_panels(
        {"layers": ({"wo": abstract_block_quantized(kind, (80,), 2)}, {})}, make_mesh(1)
    )
    laid = in_panels(blocks)
    assert jax.tree.structure(laid) == jax.tree.structure(abstract)
    for array, wanted in zip(jax.tree.leaves(laid), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype) == (wanted.shape, wanted.dtype)


def test_a_tree_with_a_variant_keeps_the_other_weights():
    plain = {"embed": 1, "final_norm": 2, "layers": ({"wqkv": 3, "wo": 4}, {"wqkv": 5, "wo": 6})}
    blocks = {"lm_head": 7, "layers": ({"wqkv": 8}, {})}
    assert with_variants(plain, blocks) == {
        "embed": 1,
        "final_norm": 2,
        "lm_head": 7,
        "layers": ({"wqkv": 8, "wo": 4}, {"wqkv": 5, "wo": 6}),
    }


@pytest.mark.skipif(
    not PACKAGED_MODELS["smollm2-135m"].is_installed(), reason="smollm2-135m is not installed"
)
@pytest.mark.parametrize(
    ("dtype", "devices", "quantization"),
    [("bfloat16", 1, "none"), ("float32", 2, "none"), ("float32", 1, "int8")],
)
def test_other_engines_have_none(dtype, devices, quantization):
    assert (
        open_model("smollm2-135m", dtype, make_mesh(devices), quantization).block_quantized is None
    )
