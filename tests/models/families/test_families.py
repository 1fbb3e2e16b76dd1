"""What a config.json means, and what of it is refused, by name."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import transformers

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.models.config_dict import config_from_dict, config_to_dict
from octavo.models.families.qwen import QWEN3_VL
from octavo.models.families.table import FAMILIES, config_from_hf, is_base
from octavo.models.flat_config import flat_config
from octavo.models.layers import rotary_frequencies
from octavo.models.rope import Rope

LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 16,
}


NEGATIVE_BETA = {
    "rope_parameters": {"llama_4_scaling_beta": -1, "original_max_position_embeddings": 4}
}


NOT_DEFAULT = {"granitemoehybrid": {"layer_types": ["full_attention"] * 32}}
"""Of a family that is read in part, fields of the part."""


def windows(config):
    return [layer.mixer.sliding_window for layer in config.layers]


def test_a_tiny_model_exists_for_every_architecture(tiny_values):
    tiny = {values["architectures"][0] for values in tiny_values.all().values()}
    # The text model of a composite checkpoint, whose tiny model is one of Qwen 3.
    assert tiny == {family.architecture for family in FAMILIES} - {QWEN3_VL.architecture}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_the_config_that_transformers_writes_by_default_is_read(family):
    kind = transformers.CONFIG_MAPPING[family.model_type]
    # The special tokens of StarCoder 2 lie outside of its default vocabulary, half of GLM-4.5's
    # default head is no even number, and DeepSeek V2's default tokens go to no number of experts.
    sizes = {"glm4_moe": {"head_dim": 128}, "deepseek_v2": {"num_experts_per_tok": 6}}
    more = sizes.get(family.model_type, {})
    values = kind(bos_token_id=1, eos_token_id=2, **more).to_dict()
    values |= NOT_DEFAULT.get(family.model_type, {})
    config = config_from_hf(values | {"architectures": None})
    number = values.get("num_hidden_layers") or len(values["layers_block_type"])
    assert config.num_layers == number
    named = config_from_hf(values | {"architectures": [family.architecture]})
    assert config == named or is_base({"architectures": [family.architecture]})


def test_gemma_3_reads_windows_norms_and_two_rotary_bases(tiny_values):
    config = config_from_hf(tiny_values("gemma3"))
    assert windows(config) == [5] * 5 + [None, 5]
    whole, local = config.layers[5].mixer, config.layers[0].mixer
    assert whole.rope.theta == 1_000_000.0
    assert whole.rope.scaling is not None
    assert local.rope == Rope(theta=10000.0)
    assert all(layer.norms.before and layer.norms.after for layer in config.layers)
    assert config.final_norm.offset == 1.0
    assert whole.qk_norm == local.qk_norm == config.final_norm == config.layers[0].norms.norm
    assert config.embedding_scale == math.sqrt(32)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (1, 3)


def test_gemma_2_alternates_and_caps(tiny_values):
    config = config_from_hf(tiny_values("gemma2"))
    assert windows(config) == [5, None, 5]
    assert config.common(lambda layer: layer.mixer.logit_softcap) == 2.0
    assert config.final_logit_softcap == 12.0
    off = config_from_hf(tiny_values("gemma2") | {"attn_logit_softcapping": None})
    assert {layer.mixer.logit_softcap for layer in off.layers} == {None}


def test_longrope_takes_the_factors_of_the_context_that_is_served(tiny_values):
    config = config_from_hf(tiny_values("llama") | {"rope_scaling": LONG})
    plain = rotary_frequencies(Rope(), 16)
    for num_tokens, factor in ((16, 1.0), (17, 2.0), (64, 2.0)):
        served = config.for_context(num_tokens)
        frequencies = rotary_frequencies(*served.layers[0].mixer.rotary)
        np.testing.assert_allclose(frequencies, plain / factor, rtol=1e-6)
        assert served.for_context(num_tokens) is served
    # A caller that says no context is served the whole of it.
    whole = rotary_frequencies(*config.layers[0].mixer.rotary)
    np.testing.assert_allclose(whole, plain / 2.0, rtol=1e-6)


def test_the_frequencies_that_turn_most_are_kept_by_yarn(tiny_values):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    values = tiny_values("llama") | {"rope_scaling": scaling, "max_position_embeddings": 16384}
    rope, head_dim = config_from_hf(values).layers[0].mixer.rotary
    assert rope.amplitude == 0.1 * math.log(4.0) + 1.0
    ratio = rotary_frequencies(Rope(), head_dim) / rotary_frequencies(rope, head_dim)
    assert ratio[0] == 1.0
    np.testing.assert_allclose(ratio[-1], 4.0, rtol=1e-6)
    assert np.all(np.diff(ratio) >= -1e-6)


@pytest.mark.parametrize(
    ("name", "published", "refused"),
    [
        (
            "phi4_long",
            {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False},
            {"full_attn_mod": 2},
        ),
        ("smollm3", {"max_window_layers": 28, "pretraining_tp": 2, "rope_scaling": None}, {}),
        (
            "starcoder2",
            {
                "norm_type": "layer_norm", "mlp_type": "default", "layer_norm_epsilon": 1e-05,
                "attention_softmax_in_fp32": True, "scale_attention_softmax_in_fp32": True,
                "scale_attn_weights": True,
            },
            {"scale_attn_weights": False},
        ),
        (
            "cohere2",
            {
                "cache_implementation": "hybrid", "layer_switch": 4, "rotary_pct": 1.0,
                "order_of_interleaved_layers": "local_attn_first", "use_embedding_sharing": True,
                "position_embedding_type": "rope_gptj", "use_gated_activation": True,
                "use_parallel_block": True, "use_parallel_embedding": True, "use_qk_norm": False,
            },
            {"rotary_pct": 0.5},
        ),
        ("exaone4_whole", {"sliding_window_pattern": None}, {}),
        ("seed_oss", {"use_cache": True, "attention_dropout": 0.1}, {"use_sliding_window": True}),
    ],
)  # fmt: skip
def test_what_published_files_say_beyond_the_defaults_is_known(
    tiny_values, name, published, refused
):
    values = tiny_values(name)
    assert config_from_hf(values | published) == config_from_hf(values)
    for field, value in refused.items():
        with pytest.raises(UnsupportedModelError, match=field):
            config_from_hf(values | {field: value})


def test_old_names_of_longrope_mean_it_in_phi_3(tiny_values):
    values = tiny_values("phi3_short")
    for old in ("su", "yarn"):
        renamed = values | {"rope_scaling": values["rope_scaling"] | {"type": old}}
        assert config_from_hf(renamed) == config_from_hf(values)


def test_a_ministral_3_that_says_no_rotary_embedding_has_that_of_published_ones(tiny_values):
    values = tiny_values("ministral3")
    del values["rope_parameters"]
    rope = config_from_hf(values).layers[0].mixer.rope
    written = transformers.Ministral3Config(num_hidden_layers=1).to_dict()
    expected = config_from_hf(written | {"architectures": ["Ministral3ForCausalLM"]})
    assert rope == expected.layers[0].mixer.rope
    plain = values | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert config_from_hf(plain).layers[0].mixer.rope.scaling.kind == "linear"


def test_files_of_phi_name_code_that_is_not_run(tiny_values):
    values, code = tiny_values("phi3"), {"AutoConfig": "configuration_phi3.Phi3Config"}
    assert config_from_hf(values | {"auto_map": code}) == config_from_hf(values)


def test_layers_rotate_nothing_where_their_family_says_so(tiny_values):
    rotates = {
        name: [layer.mixer.rope is not None for layer in config_from_hf(tiny_values(name)).layers]
        for name in (
            "smollm3",
            "smollm3_sliding",
            "granite4",
            "exaone4",
            "exaone4_whole",
            "cohere2",
        )
    }
    assert rotates == {
        "smollm3": [True, True, True, False],
        "smollm3_sliding": [True, False, True],
        "granite4": [True, True],
        "exaone4": [True, True, True, False],
        "exaone4_whole": [True, True],
        "cohere2": [True, True, True, False],
    }


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "smollm3_sliding",
            {"no_rope_layers": [1, 2, 0]},
            "no_rope_layers = [1, 2, 0]",
        ),
        ("smollm3_sliding", {"no_rope_layers": [1]}, "3 flags"),
        ("exaone4", {"sliding_window_pattern": "LGLG", "layer_types": None}, "'LGLG'"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm = True is not supported"),
        ("cohere2", {"order_of_interleaved_layers": "global_attn_first"}, "global_attn_first"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type = 'rms_norm'"),
        ("granite", {"residual_multiplier": -1.0}, "residual_multiplier = -1.0"),
        ("granite4", {"layer_types": ["attention", "rwkv"]}, "'rwkv'] is not supported"),
        ("granite4", {"layer_types": ["attention"]}, "1 entries"),
        ("granite4_hybrid", {"mamba_d_head": 9}, "mamba_d_head = 9 is not allowed"),
        ("granite4_hybrid", {"mamba_n_groups": 3}, "num_groups = 3 is not allowed"),
        ("granite4_hybrid", {"mamba_proj_bias": True}, "mamba_proj_bias = True is not supported"),
        ("granite4_hybrid", {"time_step_limit": [0.0, 0.1]}, "time_step_limit = [0.0, 0.1]"),
        ("granite4", {"num_local_experts": -1}, "num_local_experts = -1 is not allowed"),
        ("granite_moe", {"num_local_experts": None}, "lacks num_experts"),
        ("glm", {"partial_rotary_factor": 0.3}, "partial_rotary_factor = 0.3"),
        ("glm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("phi3", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("ministral3", NEGATIVE_BETA, "beta = -1.0"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "3 entries"),
        ("lfm2", {"layer_types": ["conv", "mamba"]}, "'mamba'] is not supported"),
        ("lfm2", {"layer_types": ["conv"] * 4}, "at least one with attention"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache = 1 is not allowed"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 3}, "3 entries"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate = False is not supported"),
        ("qwen3_5", {"linear_num_key_heads": 4}, "linear_num_key_heads = 4 is not allowed"),
        ("qwen3_next", {"hidden_act": "gelu_pytorch_tanh"}, "silu, with gated delta nets"),
        ("lfm2_moe", {"num_dense_layers": 5}, "num_dense_layers = 5 is not allowed"),
        ("lfm2", {"use_pos_enc": False}, "use_pos_enc = False is not supported"),
    ],
)
def test_a_family_refuses_what_it_does_not_compute(tiny_values, name, changes, words):
    with pytest.raises(ModelLoadError) as caught:
        config_from_hf(tiny_values(name) | changes)
    assert words in str(caught.value)


def test_command_r_says_its_context_in_a_field_of_its_own(tiny_values):
    values = tiny_values("cohere") | {"model_max_length": 131072}
    assert config_from_hf(values).max_position_embeddings == 131072


def test_a_pattern_says_which_layers_slide_where_types_are_absent(tiny_values):
    for name, pattern in (("exaone4", "LLLG"), ("exaone4", 4), ("cohere2", 4)):
        values = tiny_values(name) | {"layer_types": None, "sliding_window_pattern": pattern}
        assert windows(config_from_hf(values)) == [5, 5, 5, None]


def test_a_config_without_architectures_goes_by_its_model_type(tiny_values):
    values = tiny_values("qwen2")
    del values["architectures"]
    assert config_from_hf(values).common(lambda layer: layer.mixer.qkv_bias)


def test_qwen_2_slides_from_max_window_layers_on_when_asked_to(tiny_values):
    config = config_from_hf(tiny_values("qwen2") | {"use_sliding_window": True})
    assert windows(config) == [None, 64, 64]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"auto_map": {"AutoModel": "modeling.X"}}, "auto_map"),
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"residual_multiplier": 0.22}, "residual_multiplier = 0.22"),
        ({"num_experts": 8}, "num_experts = 8"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "relu2"}, "hidden_act = 'relu2'"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "beta": 2}}, "rope scaling: beta = 2"),
        ({"rope_scaling": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta = 0.1"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.5}},
            "rope scaling: mscale = 1.5",
        ),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    ],
)
def test_mathematics_that_are_not_implemented_are_refused_by_name(tiny_values, changes, words):
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_hf(tiny_values("llama") | changes)
    assert words in str(caught.value)


def test_a_chunked_layer_type_is_refused_by_name(tiny_values):
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        config_from_hf(tiny_values("gemma2") | {"layer_types": ["chunked_attention"] * 3})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "32"}, "hidden_size = '32' is not allowed: an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_key_value_heads": 3}, "num_kv_heads = 3 is not allowed: a divisor"),
        ({"head_dim": 15}, "head_dim = 15 is not allowed: an even number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "lacks short_factor"),
        ({"rope_scaling": LONG | {"long_factor": [1.0]}}, "long factors = 1 numbers"),
        ({"rope_scaling": LONG | {"short_factor": [1.0] * 7}}, "long factors = 8 numbers"),
        ({"rope_scaling": LONG | {"short_factor": "a"}}, "short_factor = 'a' is not allowed"),
        ({"rope_scaling": LONG | {"original_max_position_embeddings": 1}}, "at least 2"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": -1.0}}, "factor = -1.0"),
        ({"rope_scaling": {"rope_type": "yarn", "mscale": 1, "mscale_all_dim": -1}}, "mscale_all"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_theta": 1.0}, "above 1, for yarn"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "factor = 0.0"),
        ({"rope_scaling": "linear"}, "rope scaling"),
        ({"rope_theta": -5}, "rope theta = -5.0"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_with_its_value(tiny_values, changes, words):
    with pytest.raises(ModelLoadError) as caught:
        config_from_hf(tiny_values("llama") | changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [
        {"unknown_feature": None},
        {"unknown_feature": False},
        {"unknown_list": []},
        {"transformers_version": "4.40.0"},
        {"pretraining_tp": 2},
        {"rope_scaling": None},
    ],
)
def test_fields_that_are_off_or_harmless_change_nothing(tiny_values, extra):
    values = tiny_values("llama")
    assert config_from_hf(values | extra) == config_from_hf(values)


def test_a_config_survives_json(tiny_name, tiny_values):
    config = config_from_hf(tiny_values(tiny_name))
    again = config_from_dict(json.loads(json.dumps(config_to_dict(config))))
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "expected"),
    [
        (8, 2, 1, 2),
        (8, 2, 2, 2),
        (8, 2, 4, 4),
        (8, 2, 8, 8),
        (8, 1, 4, 4),
        (9, 3, 3, 3),
        (9, 3, 2, 3),  # 6 heads do not divide 9: attention stays whole
        (12, 3, 2, 6),
        (8, 2, 16, 2),
    ],
)
def test_kv_heads_are_copied_only_where_query_heads_divide(num_heads, num_kv_heads, size, expected):
    config = flat_config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=4,
    )  # fmt: skip
    parallel = config.with_tensor_parallel(size)
    assert parallel.layers[0].mixer.num_kv_heads == expected
    assert parallel.layers[0].mixer.num_checkpoint_kv_heads == num_kv_heads
    assert parallel.without_kv_head_copies() == config
    assert parallel.with_tensor_parallel(1) == config
