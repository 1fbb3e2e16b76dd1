"""Models with eight-bit weights: what is rounded, on any number of devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError
from octavo.models.loading.load import load_model, save_model
from octavo.models.quantization import quantized_weights
from octavo.pallas_kernels.quantized_linear import QuantizedWeight, quantized_linear
from octavo.sharding.mesh import make_mesh


def leaves(weights: Any) -> list[tuple[str, Any]]:
    found, _ = jax.tree.flatten_with_path(
        weights, is_leaf=lambda node: isinstance(node, QuantizedWeight)
    )
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in found]


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "starcoder2"])
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_logits_stay_near_those_of_the_whole_model(
    tiny_checkpoint: Any, tokens: np.ndarray, run_model: Any, quantization: str, name: str
) -> None:
    directory = tiny_checkpoint(name)
    whole = load_model(directory, "float32")
    small = load_model(directory, "float32", quantization=quantization)
    want = run_model(whole.config, whole.weights, tokens[:8], 8)
    got = run_model(small.config, small.weights, tokens[:8], 8)
    # Rounding moves a logit by a share of how far logits differ: about 1/127 a layer in int8, 1/16
    # in fp8, a handful of layers.
    spread = want.std()
    assert 0 < np.abs(got - want).mean() < spread * (0.1 if quantization == "int8" else 0.4)


def test_linear_layers_are_rounded_and_nothing_else(tiny_checkpoint: Any) -> None:
    of_experts = {"experts_gate", "experts_up", "experts_down"}
    for name in ("qwen2", "gemma3", "qwen2_moe"):
        model = load_model(tiny_checkpoint(name), "float32", quantization="int8")
        is_tied = model.config.tie_word_embeddings
        head = "embed" if is_tied else "lm_head"
        rounded = {
            path.rpartition("'")[0].rpartition("'")[2]
            for path, leaf in leaves(model.weights)
            if isinstance(leaf, QuantizedWeight)
        }
        experts = of_experts if name == "qwen2_moe" else set()
        assert rounded == {"wqkv", "wo", "w_gate_up", "w_down", head} | experts


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_two_devices_multiply_as_one(tiny_checkpoint: Any, quantization: str) -> None:
    directory = tiny_checkpoint("llama")
    one, two = (
        load_model(directory, "float32", make_mesh(size), quantization=quantization)
        for size in (1, 2)
    )
    rng = np.random.default_rng(0)
    for name in ("wqkv", "wo", "w_gate_up", "w_down"):
        weights = [model.weights["layers"][0][name] for model in (one, two)]
        assert not weights[1].values.sharding.is_fully_replicated
        inputs = weights[0].values.shape[weights[0].scale.ndim :]
        x = rng.standard_normal((5, *inputs)).astype(np.float32)
        got = [np.asarray(jax.jit(quantized_linear)(x, weight)) for weight in weights]
        if quantization == "int8":  # integers add up alike in any order
            np.testing.assert_array_equal(got[0], got[1])
        else:
            np.testing.assert_allclose(got[0], got[1], rtol=1e-5, atol=1e-5)


def test_a_layer_that_contracts_what_is_split_sends_sums_and_no_weights(
    tiny_checkpoint: Any,
) -> None:
    mesh = make_mesh(2)
    model = load_model(tiny_checkpoint("llama"), "float32", mesh, quantization="int8")
    layer = model.weights["layers"][0]
    for name in ("wqkv", "wo", "w_gate_up", "w_down"):
        weight = layer[name]
        inputs = weight.values.shape[weight.scale.ndim :]
        x = jax.ShapeDtypeStruct((4, *inputs), jnp.float32)
        text = jax.jit(quantized_linear).lower(x, weight).compile().as_text()
        assert "s8[" in text
        gathers = [line for line in text.splitlines() if "all-gather(" in line and "s8[" in line]
        assert not gathers


def test_quantizing_afterwards_is_quantizing_at_load(tiny_checkpoint: Any) -> None:
    directory, mesh = tiny_checkpoint("qwen3"), make_mesh(1)
    whole = load_model(directory, "float32", mesh)
    after = leaves(quantized_weights(whole.weights, whole.config, "fp8", mesh))
    at_load = leaves(load_model(directory, "float32", mesh, "fp8").weights)
    for (path, a), (_, b) in zip(after, at_load, strict=True):
        jax.tree.map(lambda x, y, path=path: np.testing.assert_array_equal(x, y, path), a, b)


def test_an_unknown_quantization_is_refused(tiny_checkpoint: Any) -> None:
    with pytest.raises(InvalidConfigError, match=r"quantization = 'int4'.*int8 or fp8"):
        load_model(tiny_checkpoint("llama"), quantization="int4")


def test_a_quantized_model_is_not_saved(tiny_checkpoint: Any, tmp_path: Any) -> None:
    model = load_model(tiny_checkpoint("llama"), quantization="int8")
    with pytest.raises(InvalidConfigError, match="quantization"):
        save_model(model, tmp_path / "saved")
