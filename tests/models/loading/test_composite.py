"""Checkpoints of a text model and an encoder of images: the text model is read."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.models.families.table import config_from_hf
from octavo.models.loading.load import load_model

WRAPPERS = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "mistral": "Mistral3ForConditionalGeneration",
    "ministral3": "Mistral3ForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "llama": "LlavaForConditionalGeneration",
    "qwen3": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
OLD = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NEW = {"model.": "model.language_model.", "lm_head.": "lm_head."}
VISION = {"vision_config": {"hidden_size": 8}, "image_token_index": 95}


def composite(name, values, **more):
    """A config.json around another's fields."""
    text = {key: value for key, value in values.items() if key != "architectures"}
    if name == "qwen3":  # whose text model is one that rotates by three positions
        text["model_type"] = "qwen3_vl_text"
        text["rope_scaling"] = {
            "rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2],
        }  # fmt: skip
    return {"architectures": [WRAPPERS[name]], "text_config": text, **VISION, **more}


@pytest.fixture
def write(tmp_path, tiny_values, tiny_tensors):
    def make(name, prefixes, **more):
        directory = tmp_path / "composite"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(composite(name, tiny_values(name))))
        tensors = {}
        for tensor, array in tiny_tensors(name).items():
            begin = next(begin for begin in prefixes if tensor.startswith(begin))
            tensors[prefixes[begin] + tensor.removeprefix(begin)] = array
        tensors |= more.get("tensors", {})
        save_file(tensors, directory / "model.safetensors")
        return directory

    return make


@pytest.mark.parametrize("name", sorted(WRAPPERS))
@pytest.mark.parametrize("prefixes", [OLD, NEW], ids=["old names", "new names"])
def test_the_text_model_says_what_it_says_by_itself(
    name, prefixes, write, run_model, tokens, golden_logits
):
    towers = ("vision_tower.", "multi_modal_projector.", "visual.", "audio_tower.", "embed_audio.")
    towers += ("vision_model.",) if name == "llama4" else ()
    begin = "model." if prefixes is NEW else ""
    images = {f"{begin}{tower}x.weight": np.ones((2, 2), np.float32) for tower in towers}
    model = load_model(write(name, prefixes, tensors=images), "float32")
    logits = run_model(model.config, model.weights, tokens, 12)
    np.testing.assert_allclose(logits, golden_logits[name], rtol=0, atol=1e-4)


def test_qwen_3_vl_says_of_a_text_what_its_text_model_says(
    tiny_values, tiny_tensors, golden_logits, tokens
):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = composite("qwen3", tiny_values("qwen3"))
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8}
    vision |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    kind = transformers.Qwen3VLConfig
    config = kind(text_config=values["text_config"], vision_config=vision)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    renamed = {
        re.sub(r"^model\.", NEW["model."], name): torch.from_numpy(tensor)
        for name, tensor in tiny_tensors("qwen3").items()
    }
    result = model.load_state_dict(renamed, strict=False)
    assert not result.unexpected_keys
    assert all("visual" in name for name in result.missing_keys)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None].long()).logits[0].numpy()
    np.testing.assert_allclose(logits, golden_logits["qwen3"], rtol=0, atol=1e-4)


def test_layers_that_guess_further_tokens_are_not_read(write, run_model, tokens, golden_logits):
    guesses = {"mtp.layers.0.mlp.up_proj.weight": np.ones((2, 2), np.float32)}
    model = load_model(write("qwen3_5", NEW, tensors=guesses), "float32")
    logits = run_model(model.config, model.weights, tokens, 12)
    np.testing.assert_allclose(logits, golden_logits["qwen3_5"], rtol=0, atol=1e-4)


def test_tensors_that_are_not_of_images_are_not_ignored(write):
    more = {"depth_tower.x.weight": np.ones((2, 2), np.float32)}
    with pytest.raises(ModelLoadError, match=r"does not explain: 'depth_tower\.x\.weight'"):
        load_model(write("llama", OLD, tensors=more), "float32")


def test_a_tensor_under_two_names_is_refused(write):
    twin = {"model.norm.weight": np.ones(32, np.float32)}
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' twice"):
        load_model(write("llama", OLD, tensors=twin), "float32")


def test_the_whole_file_speaks_for_its_text_model(tiny_values):
    values = tiny_values("llama")
    del values["eos_token_id"]
    config = config_from_hf(composite("llama", values, eos_token_id=[5, 6], torch_dtype="float16"))
    assert config.eos_token_ids == (5, 6)
    assert config.checkpoint_dtype == "float16"


def test_the_dtype_may_be_said_by_both_its_names(tiny_values):
    values = tiny_values("llama") | {"torch_dtype": "float16"}
    config = config_from_hf(composite("llama", values, dtype="bfloat16"))
    assert config.checkpoint_dtype == "bfloat16"


def test_a_text_model_may_leave_out_what_its_family_has_by_default():
    config = config_from_hf(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {
                "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                "num_hidden_layers": 34, "sliding_window": 1024,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            "vision_config": {},
        }
    )  # fmt: skip
    assert config.vocab_size == 262208
    mixer = config.layers[5].mixer
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == (8, 4, 256)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": None}, "text_config = None is not allowed"),
        ({"depth_config": {"hidden_size": 8}}, "depth_config"),
        ({"text_config": {"model_type": "mamba"}}, "model_type = 'mamba'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tiny_values, changes, words):
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        config_from_hf(composite("llama", tiny_values("llama")) | changes)
    assert words in str(caught.value)


def test_a_field_of_the_text_model_is_named_with_its_place(tiny_values):
    values = tiny_values("llama") | {"residual_multiplier": 0.5}
    with pytest.raises(UnsupportedModelError, match=r"text_config: residual_multiplier = 0\.5"):
        config_from_hf(composite("llama", values))
