"""Quantized checkpoints are read as the numbers that they stand for, to the last bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.models.loading.load import load_config, load_model, open_model
from octavo.models.loading.safetensors import SafetensorsSource
from octavo.models.loading.stored.formats import without_quantization
from octavo.models.quantization import NUM_INPUTS
from octavo.pallas_kernels.cpu.block_quantized_linear import dequantized
from octavo.sharding.mesh import make_mesh
from tests.models.loading.stored.conftest import Write
from tests.models.loading.stored.writers import (
    F8,
    FORMATS,
    Memory,
    quantized,
    stores_blocks,
    write_safetensors,
)

LAYER = "model.layers.1.self_attn.k_proj."


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, "llama") for name in FORMATS]
    + [(name, "qwen3_moe") for name in ("fp8 in blocks", "packed 4 bits by group", "awq", "nf4")],
)
def test_weights_are_the_numbers_that_are_stored(
    name: str, model: str, write: Write, tiny_tensors: Any
) -> None:
    stored, dense = quantized(name, tiny_tensors(model))
    directory = write(model, stored, FORMATS[name][0])
    want = load_model(write(model, dense), "float32")
    found = load_model(directory, "float32")
    jax.tree.map(np.testing.assert_array_equal, found.weights, want.weights)
    assert load_config(directory).layers == found.config.layers
    assert found.config.checkpoint_dtype == "float32"  # of what is not quantized


@pytest.mark.parametrize("name", FORMATS)
def test_a_slice_is_one_of_the_whole(name: str, write: Write, tiny_tensors: Any) -> None:
    stored, dense = quantized(name, tiny_tensors("llama"))
    source = SafetensorsSource(write("llama", stored, FORMATS[name][0]))
    rng = np.random.default_rng(1)
    for key, whole in dense.items():
        if whole.ndim != 2 or key in stored:
            continue
        assert source.shapes()[key] == whole.shape
        for _ in range(4):
            (top, bottom), (left, right) = (
                sorted(rng.choice(n + 1, 2, False)) for n in whole.shape
            )
            index = (slice(int(top), int(bottom)), slice(int(left), int(right)))
            np.testing.assert_array_equal(source.read(key, index), whole[index])


@pytest.mark.parametrize("name", ["fp8 in blocks", "awq", "packed 4 bits, ordered", "nf4"])
def test_devices_read_their_own_parts(name: str, write: Write, tiny_tensors: Any) -> None:
    stored, dense = quantized(name, tiny_tensors("llama"))
    want = load_model(write("llama", dense), "float32", make_mesh(2))
    found = load_model(write("llama", stored, FORMATS[name][0]), "float32", make_mesh(2))
    jax.tree.map(np.testing.assert_array_equal, found.weights, want.weights)


def test_experts_that_are_fused_and_quantized_are_read_one_by_one(
    write: Write, tiny_tensors: Any
) -> None:
    # As some checkpoints hold all of a layer's experts in one tensor of eight bits.
    rng = np.random.default_rng(0)
    tensors = tiny_tensors("qwen3_moe")
    prefix = "model.layers.0.mlp.experts."
    count = len({key.split(".")[5] for key in tensors if key.startswith(prefix)})
    stored, dense = dict(tensors), dict(tensors)
    for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        rows, columns = tensors[f"{prefix}0.{parts[0]}.weight"].shape
        shape = (count, rows * len(parts), columns)
        numbers = rng.normal(size=shape).astype("float32").astype(F8)
        blocks = (count, -(-shape[1] // 16), -(-columns // 16))
        scales = rng.uniform(0.01, 0.1, blocks).astype(np.float32)
        wide = scales.repeat(16, 1)[:, : shape[1]].repeat(16, 2)[:, :, :columns]
        whole = numbers.astype(np.float32) * wide
        stored |= {prefix + fused: numbers, f"{prefix}{fused}_scale_inv": scales}
        for expert in range(count):
            for number, part in enumerate(parts):
                key = f"{prefix}{expert}.{part}.weight"
                dense[key] = whole[expert, number * rows : (number + 1) * rows]
                del stored[key]
    how = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    found = load_model(write("qwen3_moe", stored, how), "float32")
    want = load_model(write("qwen3_moe", dense), "float32")
    jax.tree.map(np.testing.assert_array_equal, found.weights, want.weights)


def test_layers_of_one_checkpoint_may_have_schemes_of_their_own(
    write: Write, tiny_tensors: Any
) -> None:
    fours, of_fours = quantized("packed 4 bits by group", tiny_tensors("llama"))
    eights, of_eights = quantized("fp8 by output", tiny_tensors("llama"), 1)
    is_attention = ".self_attn."
    stored = {key: value for key, value in fours.items() if is_attention not in key}
    stored |= {key: value for key, value in eights.items() if is_attention in key}
    dense = of_fours | {key: value for key, value in of_eights.items() if is_attention in key}
    schemes = [FORMATS[name][0] for name in ("packed 4 bits by group", "fp8 by output")]
    groups = [
        scheme["config_groups"]["group_0"] | {"format": scheme["format"]} for scheme in schemes
    ]
    groups[1] = groups[1] | {"targets": ["re:.*self_attn.*"]}
    how = schemes[0] | {
        "format": "mixed-precision",
        "config_groups": {"a": groups[0], "b": groups[1]},
    }
    found = load_model(write("llama", stored, how), "float32")
    jax.tree.map(
        np.testing.assert_array_equal, found.weights, load_model(write("llama", dense)).weights
    )


def test_modelopts_own_file_says_it_too(write: Write, tiny_tensors: Any) -> None:
    stored, dense = quantized("nvfp4", tiny_tensors("llama"))
    directory = write("llama", stored, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    values = json.loads((directory / "config.json").read_text())
    del values["quantization_config"]
    (directory / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelLoadError, match="dtype"):
        load_model(directory)
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(said))
    found = load_model(directory, "float32")
    jax.tree.map(
        np.testing.assert_array_equal, found.weights, load_model(write("llama", dense)).weights
    )


def test_a_text_model_of_a_composite_checkpoint_is_quantized_alone(
    write: Write, tiny_tensors: Any, tiny_values: Any, tmp_path: Path
) -> None:
    stored, dense = quantized("awq", tiny_tensors("gemma3"))
    directory = write("gemma3", stored, FORMATS["awq"][0])
    text = json.loads((directory / "config.json").read_text())
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (directory / "config.json").write_text(json.dumps(values | {"text_config": text}))
    moved = {
        key.replace("model.", "language_model.model.", 1): value for key, value in stored.items()
    }
    write_safetensors(directory / "model.safetensors", moved)
    found = load_model(directory, "float32")
    jax.tree.map(
        np.testing.assert_array_equal, found.weights, load_model(write("gemma3", dense)).weights
    )


PARTS = [
    (name, part)
    for name in FORMATS
    for part in FORMATS[name][1](np.random.default_rng(0), (16, 32))[0]
    if part not in {"bias", "g_idx", "weight_g_idx", "weight_format"}
    and not part.endswith(("activation_scale", "input_scale"))
    and not (part == "weight_zero_point" or part == "weight_shape")
]


@pytest.mark.parametrize(("name", "part"), PARTS)
@pytest.mark.parametrize("change", ["lacks", "dtype", "shape"])
def test_a_part_that_is_not_as_it_must_be_is_refused_by_name(
    name: str, part: str, change: str, write: Write, tiny_tensors: Any
) -> None:
    stored, _ = quantized(name, tiny_tensors("llama"))
    key = LAYER + part
    tensor = stored.pop(key)
    if change == "dtype":
        wrong = np.int64 if tensor.dtype != np.int64 else np.float32
        stored[key] = np.zeros(tensor.shape, wrong)
    elif change == "shape":
        # One more of everything, so that a scale for all fits nothing either.
        stored[key] = np.zeros(tuple(size + 1 for size in tensor.shape) or (2,), tensor.dtype)
    with pytest.raises(ModelLoadError) as caught:
        open_model(write("llama", stored, FORMATS[name][0]))
    assert "layers.1.self_attn.k_proj" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "part", "value", "words"),
    [
        ("awq", "scales", np.nan, "scales' holds nan, which is not allowed: finite numbers"),
        ("fp8 in blocks", "weight_scale_inv", np.inf, "holds inf"),
        ("nf4", "weight.nested_absmax", np.nan, "holds nan"),
        ("nf4", "weight.quant_map", np.nan, "holds nan"),
        ("nvfp4", "weight_scale_2", np.inf, "holds inf"),
        ("mxfp4, compressed", "weight_scale", 255, "holds 255, which is not allowed: 0 to 254"),
        ("packed 4 bits, ordered", "weight_g_idx", 2, "holds 2, which is not allowed: 0 to 1"),
        ("gptq of 4 bits", "g_idx", -1, "holds -1, which is not allowed: 0 to 1"),
        ("packed 4 bits by group", "weight_shape", 7, "holds (7, 7), which is not allowed"),
        ("gptq of 4 bits", "bias", 1, "does not explain: 'model.layers.1.self_attn.k_proj.bias'"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", 7, "is no JSON object"),
    ],
)  # fmt: skip
def test_values_that_stand_for_nothing_are_refused(
    name: str, part: str, value: float, words: str, write: Write, tiny_tensors: Any
) -> None:
    stored, _ = quantized(name, tiny_tensors("llama"))
    tensor = stored[LAYER + part]
    stored[LAYER + part] = np.full(tensor.shape, value, tensor.dtype)
    with pytest.raises(ModelLoadError) as caught:
        load_model(write("llama", stored, FORMATS[name][0]))
    assert words in str(caught.value)


def test_a_tensor_that_is_there_twice_is_refused(write: Write, tiny_tensors: Any) -> None:
    tensors = tiny_tensors("llama")
    stored, _ = quantized("awq", tensors)
    stored[f"{LAYER}weight"] = tensors[f"{LAYER}weight"]
    with pytest.raises(ModelLoadError, match=r"k_proj.weight' twice, as .*qweight' too"):
        load_model(write("llama", stored, FORMATS["awq"][0]))


def test_two_formats_in_one_checkpoint_are_refused(write: Write, tiny_tensors: Any) -> None:
    stored, _ = quantized("awq", tiny_tensors("llama"))
    others, _ = quantized("fp8 in blocks", tiny_tensors("llama"))
    stored = {key: value for key, value in stored.items() if not key.startswith(LAYER)}
    stored |= {key: value for key, value in others.items() if key.startswith(LAYER)}
    with pytest.raises(ModelLoadError, match=r"k_proj"):
        load_model(write("llama", stored, FORMATS["awq"][0]))


COMPRESSED = FORMATS["packed 4 bits by group"][0]
AWQ, GPTQ = FORMATS["awq"][0], FORMATS["gptq of 4 bits"][0]
FP8 = FORMATS["fp8 in blocks"][0]


def _weights(**changes: Any) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    return COMPRESSED | {"config_groups": {"g": group | {"weights": group["weights"] | changes}}}


def _group(**changes: Any) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    return COMPRESSED | {"config_groups": {"g": group | changes}}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"quant_method": "hqq"}, "quant_method = 'hqq' is not supported: awq, bitsandbytes"),
        ("awq!", "quant_method = 'awq!' is not supported"),
        ([1], "quant_method = [1] is not supported"),
        ({"bits": 4}, "quant_method = None is not supported"),
        (AWQ | {"bits": 3}, "bits = 3 is not supported: 4"),
        (AWQ | {"version": "gemv"}, "version = 'gemv' is not supported: 'gemm'"),
        (AWQ | {"zero_point": False}, "zero_point = False is not supported"),
        (AWQ | {"group_size": 0}, "group_size = 0 is not allowed: -1, or an integer"),
        (GPTQ | {"bits": 5}, "bits = 5 is not supported: 2, 3, 4, 8"),
        (GPTQ | {"bits": True}, "bits = True is not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin' is not"),
        (GPTQ | {"dynamic": {"+:x": {"bits": 8}}}, "dynamic = {"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype = 'int8' is not supported"),
        (FP8 | {"weight_block_size": [128]}, "weight_block_size = [128] is not allowed"),
        (FP8 | {"weight_block_size": [128, 0]}, "weight_block_size = [128, 0]"),
        (FP8 | {"fmt": "e5m2"}, "fmt = 'e5m2' is not supported: 'e4m3'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ' is"),
        (COMPRESSED | {"format": "marlin-24"}, "format = 'marlin-24' is not supported: pack-"),
        (COMPRESSED | {"config_groups": {}}, "config_groups = {} is not allowed: 1 to 64"),
        (COMPRESSED | {"config_groups": {"g": 3}}, "config_groups.'g' = 3 is not supported"),
        (COMPRESSED | {"transform_config": {"r1": 1}}, "transform_config = {'r1': 1} is not"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse"}}, "sparsity_config = {"),
        (COMPRESSED | {"quantization_status": "frozen"}, "quantization_status = 'frozen'"),
        (_group(targets="Linear"), "targets = 'Linear' is not allowed: a list of strings"),
        (_group(targets=["re:("]), "is not allowed: a pattern"),
        (_group(weights=None), "weights = None is not allowed: an object"),
        (_weights(num_bits=3), "num_bits = 3 is not supported: 2 or 4 or 8"),
        (_weights(type="float"), "type = 'float' is not supported: 'int'"),
        (_weights(strategy="token"), "strategy = 'token' is not supported"),
        (_weights(strategy="block"), "block_structure = None is not allowed"),
        (_weights(group_size="x"), "group_size = 'x' is not allowed"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_configuration_that_says_something_else_is_refused(
    how: Any, words: str, write: Write, tiny_tensors: Any
) -> None:
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        load_model(write("llama", tiny_tensors("llama"), how))
    assert words in str(caught.value)
    with pytest.raises((ModelLoadError, UnsupportedModelError)):
        load_config(write("llama", tiny_tensors("llama"), how))


def test_a_pattern_that_takes_for_ever_is_refused(write: Write, tiny_tensors: Any) -> None:
    stored, _ = quantized("packed 4 bits by group", tiny_tensors("llama"))
    how = copy.deepcopy(FORMATS["packed 4 bits by group"][0])
    how["config_groups"]["group_0"]["targets"] = [r"re:(\w+|.+?)*(?<!.)"]
    with pytest.raises(ModelLoadError, match=r"a pattern that is compared with '\S+' within"):
        load_model(write("llama", stored, how))


HOSTILE: list[Any] = [
    None, True, False, "", "text", "\0", "\ud800", "x" * 5000, [], [[1]], [1, "a", None], [-1], {},
    {"a": {}}, -1, 0, 1, 1.5, float("nan"), float("inf"), 2**31, 2**63, 10**400, "re:(",
    "re:" + "(a" * 500,
]  # fmt: skip


def everywhere(value: Any) -> Iterator[Any]:
    """A document with each hostile value in each of its places, in turn."""
    yield from HOSTILE
    if not isinstance(value, (dict, list)):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        for changed in everywhere(inner):
            copy = dict(value) if isinstance(value, dict) else list(value)
            copy[key] = changed
            yield copy


@pytest.mark.parametrize("name", FORMATS)
def test_any_value_anywhere_is_read_or_refused(name: str) -> None:
    parts, _ = FORMATS[name][1](np.random.default_rng(0), (16, 32))
    disk = Memory({f"layer.{part}": tensor for part, tensor in parts.items()})
    for how in everywhere(FORMATS[name][0]):
        words = ""
        try:
            _, form = without_quantization({"quantization_config": how})
            if form is not None:
                form(disk, ())
        except (ModelLoadError, UnsupportedModelError) as error:
            words = str(error)
        assert len(words) < 1000


@pytest.mark.parametrize("name", FORMATS)
def test_integers_in_groups_are_also_read_as_blocks(
    name: str, write: Write, tiny_tensors: Any
) -> None:
    stored, _ = quantized(name, tiny_tensors("llama"))
    opened = open_model(write("llama", stored, FORMATS[name][0]), "float32")
    assert opened.block_quantized is not None
    weights, blocks = opened.read_weights()["layers"][1], opened.block_quantized.read()
    abstract = opened.block_quantized.abstract()
    for array, like in zip(jax.tree.leaves(blocks), jax.tree.leaves(abstract), strict=True):
        assert (array.shape, array.dtype) == (like.shape, like.dtype)
    found = blocks["layers"][1]
    if not stores_blocks(name):
        assert not found
        return
    # Inputs of 48 are no multiple of a word's three bits.
    assert found.keys() >= {"wqkv", "wo", "w_gate_up"}
    assert "w_down" in found or name in {"gptq of 3 bits", "mxfp4, compressed"}
    for key, weight in found.items():
        dense = np.asarray(weights[key])
        dense = np.moveaxis(dense.reshape(-1, *dense.shape[NUM_INPUTS[key] :]), 0, -1)
        np.testing.assert_array_equal(np.asarray(dequantized(weight)), dense)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["awq", "gptq of 8 bits, second form", "packed 4 bits by group"])
def test_blocks_are_the_numbers_whatever_scales_are(
    name: str, dtype: Any, write: Write, tiny_tensors: Any
) -> None:
    stored, _ = quantized(name, tiny_tensors("llama"))
    rng = np.random.default_rng(3)
    for key, tensor in stored.items():
        if key.endswith((".scales", ".weight_scale")):
            stored[key] = rng.uniform(1e-4, 3e-2, tensor.shape).astype(dtype)
    opened = open_model(write("llama", stored, FORMATS[name][0]), "float32")
    assert opened.block_quantized is not None
    found = opened.block_quantized.read()["layers"][0]
    # A difference of products under scales of 32 bits would round otherwise.
    assert bool(found) == (dtype != np.float32 or name.startswith("packed"))
    weights = opened.read_weights()["layers"][0]
    for key, weight in found.items():
        dense = np.asarray(weights[key])
        dense = np.moveaxis(dense.reshape(-1, *dense.shape[NUM_INPUTS[key] :]), 0, -1)
        np.testing.assert_array_equal(np.asarray(dequantized(weight)), dense)
