"""One model from safetensors, GGUF and Orbax is one model, on one device or several."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.engine.errors import ModelLoadError
from octavo.models.layers import rotary_frequencies
from octavo.models.loading.load import load_config, load_model, save_model
from octavo.sharding.mesh import make_mesh


def assert_same_weights(found, expected, atol=0.0):
    leaves, tree = jax.tree.flatten(expected)
    found_leaves, found_tree = jax.tree.flatten(found)
    assert found_tree == tree
    for one, other in zip(found_leaves, leaves, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=0, atol=atol
        )


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "smollm2", "smollm3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"),
        *("granite", "qwen3_moe", "phi3", "ernie4_5", "olmo2", "olmo3", "exaone4"),
        *("cohere", "cohere2", "starcoder2", "ministral3"),
    ],
)
def test_gguf_and_safetensors_hold_the_same_model(name, tiny_gguf, tiny_checkpoint):
    from_hf = load_model(tiny_checkpoint(name), "float32")
    from_gguf = load_model(tiny_gguf(name), "float32")
    # Gemma's 1 + w is rounded once more on its way through the GGUF file.
    assert_same_weights(from_gguf.weights, from_hf.weights, atol=2e-7)
    # A GGUF file names one end-of-text token here, and says "bfloat16" of anything quantized.
    assert from_gguf.config == replace(from_hf.config, eos_token_ids=from_gguf.config.eos_token_ids)
    assert from_gguf.tokenizer_source == from_gguf.source


def test_llama_3_rotary_factors_of_a_gguf_file_mean_its_scaling(
    tiny_gguf, tiny_checkpoint, tiny_values
):
    rope, head_dim = load_config(tiny_checkpoint("llama3")).layers[0].mixer.rotary
    plain = rotary_frequencies(replace(rope, scaling=None), head_dim)
    scaled = rotary_frequencies(rope, head_dim)

    def add_factors(writer):
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))

    from_gguf = load_model(tiny_gguf("llama3", add_factors), "float32").config
    for layer in from_gguf.layers:
        np.testing.assert_allclose(rotary_frequencies(*layer.mixer.rotary), scaled, rtol=1e-6)


def test_longrope_of_a_gguf_file_is_that_of_its_config(tiny_gguf, tiny_checkpoint):
    from_hf = load_model(tiny_checkpoint("phi4_long"), "float32")
    from_gguf = load_model(tiny_gguf("phi4_long"), "float32")
    assert_same_weights(from_gguf.weights, from_hf.weights)
    for context in (8, 9):
        found, expected = (
            model.config.for_context(context).layers[0].mixer.rotary
            for model in (from_gguf, from_hf)
        )
        frequencies = (rotary_frequencies(*found), rotary_frequencies(*expected))
        np.testing.assert_allclose(*frequencies, rtol=1e-6)
        assert found[0].rotary_dim(16) == expected[0].rotary_dim(16) == 12
        np.testing.assert_allclose(found[0].amplitude, expected[0].amplitude, rtol=1e-6)


def test_gguf_may_list_the_sliding_layers_of_gemma_3(tiny_gguf):
    slides = [True, False, True, True, True, True, False]
    path = tiny_gguf(
        "gemma3", lambda writer: writer.add_array("gemma3.attention.sliding_window_pattern", slides)
    )
    layers = load_config(path).layers
    assert [layer.mixer.sliding_window is not None for layer in layers] == slides
    assert [layer.mixer.rope.theta == 10000.0 for layer in layers] == slides


@pytest.mark.parametrize("name", ["llama_biased", "gemma3", "qwen2_moe", "phi4_long", "starcoder2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_orbax_checkpoint_restores_the_same_bits(name, dtype, tiny_checkpoint, tmp_path):
    loaded = load_model(tiny_checkpoint(name), dtype)
    save_model(loaded, tmp_path / "saved")
    restored = load_model(tmp_path / "saved", dtype)
    assert_same_weights(restored.weights, loaded.weights)
    assert restored.config == replace(loaded.config, checkpoint_dtype=dtype)
    assert restored.kind == "orbax"
    assert load_config(tmp_path / "saved").num_layers == loaded.config.num_layers


def test_all_three_formats_give_the_same_logits(
    tiny_gguf, tiny_checkpoint, tmp_path, run_model, tokens, golden_logits
):
    from_hf = load_model(tiny_checkpoint("smollm2"), "float32")
    save_model(from_hf, tmp_path / "saved")
    for model in (from_hf, load_model(tiny_gguf("smollm2")), load_model(tmp_path / "saved")):
        logits = run_model(model.config, model.weights, tokens, 12)
        np.testing.assert_allclose(logits, golden_logits["smollm2"], rtol=0, atol=1e-4)


def test_sharded_safetensors_are_read_through_their_index(
    tiny_checkpoint, tiny_tensors, tiny_values, tmp_path
):
    whole = load_model(tiny_checkpoint("qwen2"), "float32")
    directory = tmp_path / "sharded"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_values("qwen2")))
    tensors = tiny_tensors("qwen2")
    names = sorted(tensors)
    weight_map = {}
    for shard, part in enumerate((names[::2], names[1::2])):
        filename = f"model-{shard + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, directory / filename)
        weight_map |= dict.fromkeys(part, filename)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_same_weights(load_model(directory, "float32").weights, whole.weights)


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_half_precision_checkpoints_load_in_either_dtype(stored, tiny_checkpoint, tiny_tensors):
    tensors = {
        name: tensor.astype(jnp.dtype(stored)) for name, tensor in tiny_tensors("llama").items()
    }
    directory = tiny_checkpoint("llama", tensors)
    wide, narrow = load_model(directory, "float32"), load_model(directory, "bfloat16")
    assert wide.config.checkpoint_dtype == stored
    embedding = tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(wide.weights["embed"], embedding.astype(np.float32))
    np.testing.assert_array_equal(narrow.weights["embed"], embedding.astype(jnp.bfloat16))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_weights_read_onto_a_wider_mesh_give_the_same_logits(
    name, size, tiny_checkpoint, run_model, tokens, golden_logits
):
    # 4 query heads over 2 KV heads: split at 2, copied at 4, whole at 3.
    model = load_model(tiny_checkpoint(name), "float32", make_mesh(size))
    layer = model.weights["layers"][0]
    assert model.config.layers[0].mixer.num_kv_heads == {2: 2, 3: 2, 4: 4}[size]
    split = layer["wqkv"].addressable_shards[0].data.shape[1]
    assert split == {2: 1, 3: 2, 4: 1}[size]
    assert layer["w_down"].addressable_shards[0].data.shape[0] == 48 // size
    logits = run_model(model.config, model.weights, tokens, 12)
    np.testing.assert_allclose(logits, golden_logits[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size"),
    # Fused and partly rotated; in pairs; one norm of all queries; biases; no gate.
    [
        *(("phi4_long", 2), ("phi4_long", 4), ("glm4", 2), ("olmo3", 2), ("olmo3", 4)),
        *(("cohere2", 3), ("starcoder2", 3)),
    ],
)
def test_tensors_that_lie_otherwise_on_disk_are_read_onto_a_wider_mesh(
    name, size, tiny_checkpoint, run_model, tokens, golden_logits
):
    model = load_model(tiny_checkpoint(name), "float32", make_mesh(size))
    split = model.weights["layers"][0]["wqkv"].addressable_shards[0].data.shape[1]
    assert split == model.config.layers[0].mixer.num_kv_heads // size
    config = model.config.for_context(len(tokens))
    logits = run_model(config, model.weights, tokens, 12)
    np.testing.assert_allclose(logits, golden_logits[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size", "parameter", "dim"),
    [
        ("lfm2_biased", 4, "conv_in", 2),
        ("qwen3_next", 2, "delta_in", 1),
        ("qwen3_5", 2, "delta_in", 1),
        ("qwen3_5", 4, "delta_in", None),  # two key heads: whole; attention's heads have copies
        ("granite4_groups", 2, "mamba_in", 1),
        ("granite4_hybrid", 4, "mamba_out", 1),  # of one group, heads are split
        ("falcon_h1", 3, "mamba_out", 1),  # and attention beside them is whole
        ("falcon_h1_normed", 2, "mamba_in", 1),  # its one KV head has copies
    ],
)
def test_recurrent_layers_are_read_onto_a_wider_mesh(
    name, size, parameter, dim, tiny_checkpoint, run_model, tokens, golden_logits
):
    model = load_model(tiny_checkpoint(name), "float32", make_mesh(size))
    if dim is not None:
        layer = next(layer for layer in model.weights["layers"] if parameter in layer)
        whole = layer[parameter].shape[dim]
        assert layer[parameter].addressable_shards[0].data.shape[dim] == whole // size
    logits = run_model(model.config, model.weights, tokens, 12)
    np.testing.assert_allclose(logits, golden_logits[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("saved_on", "restored_on"), [(1, 4), (4, 1), (4, 2), (2, 3)])
def test_an_orbax_checkpoint_restores_onto_another_mesh(
    saved_on, restored_on, tiny_checkpoint, tmp_path
):
    directory = tiny_checkpoint("llama_biased", num_key_value_heads=4)
    save_model(load_model(directory, "float32", make_mesh(saved_on)), tmp_path / "saved")
    mesh = make_mesh(restored_on)
    restored = load_model(tmp_path / "saved", "float32", mesh)
    expected = load_model(directory, "float32", mesh)
    assert restored.config.layers == expected.config.layers
    assert_same_weights(restored.weights, expected.weights)
    for one, other in zip(
        jax.tree.leaves(restored.weights), jax.tree.leaves(expected.weights), strict=True
    ):
        assert one.sharding == other.sharding


# Biased; with gates of outputs, beside recurrent layers; in a layer that recurs, too. 4 query heads
# over 2 KV heads.
@pytest.mark.parametrize(("name", "layer"), [("qwen2", 0), ("qwen3_5", 2), ("falcon_h1", 0)])
def test_orbax_makes_and_unmakes_copies_of_kv_heads(name, layer, tiny_checkpoint, tmp_path):
    directory = tiny_checkpoint(name)
    copied = load_model(directory, "float32", make_mesh(4))
    assert copied.config.layers[layer].attention.kv_head_copies == 2
    save_model(copied, tmp_path / "saved")
    for size in (1, 4):
        restored = load_model(tmp_path / "saved", "float32", make_mesh(size))
        expected = load_model(directory, "float32", make_mesh(size))
        assert restored.config.layers == expected.config.layers
        assert_same_weights(restored.weights, expected.weights)


def test_the_tokenizer_travels_with_an_orbax_checkpoint(tiny_gguf, tiny_checkpoint, tmp_path):
    from octavo.models.loading.gguf_file import GGUFFile

    directory = tiny_checkpoint("llama")
    (directory / "tokenizer.json").write_text("{}")
    save_model(load_model(directory), tmp_path / "from_hf")
    assert (tmp_path / "from_hf" / "tokenizer.json").read_text() == "{}"
    assert load_model(tmp_path / "from_hf").tokenizer_source == tmp_path / "from_hf"

    source = load_model(tiny_gguf("smollm2"))
    save_model(source, tmp_path / "from_gguf")
    restored = load_model(tmp_path / "from_gguf")
    packed, original = GGUFFile(restored.tokenizer_source), GGUFFile(source.tokenizer_source)
    assert packed.metadata == original.metadata
    assert packed.tensors == {}


def test_an_orbax_checkpoint_of_the_first_format_is_read(tiny_checkpoint, tmp_path):
    """What was saved before layers had specs: one set of fields for all layers."""
    loaded = load_model(tiny_checkpoint("gemma3"), "float32")
    save_model(loaded, tmp_path / "saved")
    path = tmp_path / "saved" / "octavo_config.json"
    document = json.loads(path.read_text())
    scaling = {"kind": "linear", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position": 8192, "factors": []}  # fmt: skip
    first = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_layers": 7,
        "num_heads": 4, "num_kv_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "activation": "gelu_tanh", "tie_word_embeddings": True, "qkv_bias": False,
        "attention_out_bias": False, "mlp_bias": False, "qk_norm": True, "post_norms": True,
        "norm_offset": 1.0, "rope": {"theta": 1000000.0, "scaling": scaling},
        "local_rope": {"theta": 10000.0, "scaling": None},
        "layer_kinds": ["sliding"] * 5 + ["global", "sliding"], "sliding_window": 5,
        "attn_logit_softcap": None, "final_logit_softcap": None, "query_scale": 0.25,
        "embedding_scale": 32**0.5, "max_position_embeddings": 64, "bos_token_id": 2,
        "eos_token_ids": [1, 3], "checkpoint_dtype": "float32", "kv_head_copies": 1,
    }  # fmt: skip
    path.write_text(json.dumps(document | {"format_version": 1, "model": first}))
    restored = load_model(tmp_path / "saved", "float32")
    assert restored.config == loaded.config
    assert_same_weights(restored.weights, loaded.weights)
    wrong = {"attention_sinks": 4, "layer_kinds": ["global"], "rope": 5}
    for name, value in wrong.items():
        model = first | {name: value}
        path.write_text(json.dumps(document | {"format_version": 1, "model": model}))
        with pytest.raises(ModelLoadError, match=f"(?i){name}"):
            load_config(tmp_path / "saved")
