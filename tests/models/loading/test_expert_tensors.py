"""Experts as checkpoints hold them: a tensor each, or all of a layer's in one."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from safetensors.numpy import save_file

from octavo.engine.errors import ModelLoadError
from octavo.models.blocks.experts import Gate
from octavo.models.loading.load import load_model, open_model
from octavo.models.weight_variants.block_quantized import abstract_in_panels, in_panels
from octavo.pallas_kernels.routed_experts import ExpertWeights
from octavo.pallas_kernels.routed_experts.tiles import tiled_experts
from octavo.sharding.mesh import make_mesh

PREFIX = "model.layers.0.mlp.experts."


def fused(tensors: dict[str, np.ndarray], num_layers: int, num_experts: int) -> dict[str, Any]:
    """The same tensors, gates and ups of all of a layer's experts in one."""
    tensors = dict(tensors)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            which: np.stack(
                [tensors.pop(f"{prefix}{e}.{which}_proj.weight") for e in range(num_experts)]
            )
            for which in ("gate", "up", "down")
        }
        tensors[prefix + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        tensors[prefix + "down_proj"] = parts["down"]
    return tensors


@pytest.mark.parametrize("num_devices", [1, 4, 3])
def test_fused_experts_are_the_same_experts(
    num_devices: int, tiny_checkpoint: Any, tiny_tensors: Any
) -> None:
    whole = load_model(tiny_checkpoint("qwen3_moe"), "float32")
    tensors = fused(tiny_tensors("qwen3_moe"), 2, 8)
    model = load_model(tiny_checkpoint("qwen3_moe", tensors), "float32", make_mesh(num_devices))
    experts = model.weights["layers"][0]["experts_up"]
    local = {1: (8, 32, 32), 4: (2, 32, 32), 3: (8, 32, 32)}[num_devices]
    assert experts.addressable_shards[0].data.shape == local
    for one, other in zip(
        jax.tree.leaves(model.weights["layers"][0]),
        jax.tree.leaves(whole.weights["layers"][0]),
        strict=True,
    ):
        if num_devices == 1 or one is experts:
            np.testing.assert_array_equal(one, other)


def refused(path: Any, *words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_model(path)
    for word in words:
        assert word in str(caught.value)


def test_an_expert_that_a_shard_lacks_is_named(
    tiny_checkpoint: Any, tiny_tensors: Any, tiny_values: Any, tmp_path: Any
) -> None:
    directory = tmp_path / "sharded"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_values("qwen3_moe")))
    tensors, lost = tiny_tensors("qwen3_moe"), PREFIX + "5.up_proj.weight"
    weight_map = {}
    for shard, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        filename = f"model-{shard + 1:05}-of-00002.safetensors"
        kept = {name: tensors[name] for name in names if name != lost}
        save_file(kept, directory / filename)
        weight_map |= dict.fromkeys(kept, filename)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    refused(directory, f"lacks '{lost}'")
    weight_map[lost] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    refused(directory, lost, "does not hold it")


def test_more_experts_than_the_configuration_says_are_named(
    tiny_checkpoint: Any, tiny_tensors: Any
) -> None:
    tensors = tiny_tensors("qwen3_moe")
    tensors[PREFIX + "8.up_proj.weight"] = tensors[PREFIX + "7.up_proj.weight"].copy()
    refused(tiny_checkpoint("qwen3_moe", tensors), "does not explain", PREFIX + "8.up_proj")


@pytest.mark.parametrize(
    ("name", "cut"),
    [("gate_up_proj", np.s_[:7]), ("gate_up_proj", np.s_[:, :32]), ("down_proj", np.s_[:, :, :8])],
    ids=["experts", "rows", "columns"],
)
def test_fused_experts_of_another_shape_are_not_taken_for_them(
    name: str, cut: Any, tiny_checkpoint: Any, tiny_tensors: Any
) -> None:
    tensors = fused(tiny_tensors("qwen3_moe"), 2, 8)
    tensors[PREFIX + name] = np.ascontiguousarray(tensors[PREFIX + name][cut])
    first = "gate" if name == "gate_up_proj" else "down"
    refused(tiny_checkpoint("qwen3_moe", tensors), f"lacks '{PREFIX}0.{first}_proj.weight'")


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1])
def test_experts_of_a_gguf_are_multiplied_as_their_blocks(
    kind: GGMLQuantizationType, tiny_gguf: Any
) -> None:
    opened = open_model(tiny_gguf("qwen3_moe", kind=kind), "float32")
    assert opened.block_quantized is not None
    blocks, abstract = opened.block_quantized.read(), opened.block_quantized.abstract()
    assert jax.tree.map(jnp.shape, blocks) == jax.tree.map(lambda leaf: leaf.shape, abstract)
    panels = in_panels(blocks)
    announced = abstract_in_panels(abstract, opened.mesh)
    assert jax.tree.map(jnp.shape, panels) == jax.tree.map(lambda leaf: leaf.shape, announced)
    plain = opened.read_weights()["layers"][1]
    rng = np.random.default_rng(0)
    run = jax.jit(partial(tiled_experts, gated=Gate("silu")))
    for tokens, packed in ((1, blocks), (9, panels)):
        x = rng.standard_normal((tokens, 32)).astype(np.float32)
        chosen = np.argsort(rng.random((tokens, 8)), axis=1)[:, :3].astype(np.int32)
        share = rng.random((tokens, 3)).astype(np.float32)
        found, want = (
            run(x, chosen, share, ExpertWeights(**{which: weights[f"experts_{which}"]
                                                   for which in ("gate", "up", "down")}))
            for weights in (packed["layers"][1], plain)
        )  # fmt: skip
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("prefix", ["model.layers.3.", "model.mtp_block.0."])
def test_layers_that_guess_further_tokens_are_not_read(
    prefix: str, tiny_checkpoint: Any, tiny_tensors: Any
) -> None:
    tensors = tiny_tensors("glm4_moe")
    tensors[prefix + "eh_proj.weight"] = np.ones((4, 4), np.float32)
    whole = load_model(tiny_checkpoint("glm4_moe", tensors), "float32")
    assert len(whole.weights["layers"]) == 3
    without = tiny_checkpoint("glm4_moe", tensors, num_nextn_predict_layers=0)
    refused(without, "does not explain", prefix + "eh_proj.weight")


def test_a_gguf_with_fewer_experts_than_it_says_is_refused(tiny_gguf: Any) -> None:
    path = tiny_gguf("qwen3_moe", lambda writer: None)
    data = path.read_bytes()
    key = b"qwen3moe.expert_count"
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + (16).to_bytes(4, "little") + data[at + 4 :])
    refused(path, "mlp.experts.0.down_proj.weight = (8, 32, 32) is not allowed: (32, 32)")
