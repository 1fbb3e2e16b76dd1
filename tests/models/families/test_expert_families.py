"""What families with experts read of their files, and what of it they refuse, by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.config_dict import config_from_dict, config_to_dict
from octavo.models.families.table import config_from_hf
from octavo.models.loading.load import open_model
from octavo.models.weight_variants.logit_bounds import can_bound_logits


def sparse(config: Any) -> list[bool]:
    return [isinstance(layer.feed_forward, Experts) for layer in config.layers]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("qwen3_moe", {"num_hidden_layers": 6, "decoder_sparse_step": 2}, "-X-X-X"),
        ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0, 3]}, "-XX-"),
        ("glm4_moe", {"num_hidden_layers": 4, "first_k_dense_replace": 3}, "---X"),
        ("glm4_moe", {"first_k_dense_replace": 0}, "XXX"),
        ("deepseek_v3", {"num_hidden_layers": 4, "first_k_dense_replace": None}, "---X"),
        ("deepseek_v2", {"first_k_dense_replace": None}, "XXX"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "X-X"),
        ("ernie4_5_moe", {"num_hidden_layers": 4, "moe_layer_end_index": -1}, "-XXX"),
        ("ernie4_5_moe", {"num_hidden_layers": 6, "moe_layer_interval": 2,
                          "moe_layer_start_index": 2, "moe_layer_end_index": 4}, "---X--"),
    ],
)  # fmt: skip
def test_layers_have_experts_where_the_file_says(
    name: str, changes: dict[str, Any], expected: str, tiny_values: Any
) -> None:
    config = config_from_hf(tiny_values(name) | changes)
    assert sparse(config) == [letter == "X" for letter in expected]


def test_a_gpt_oss_without_a_rotary_embedding_has_that_of_all_there_are(tiny_values: Any) -> None:
    values = tiny_values("gpt_oss")
    del values["rope_scaling"]
    rope = config_from_hf(values).layers[0].mixer.rope
    assert (rope.theta, rope.scaling.kind, rope.scaling.factor) == (150_000.0, "yarn", 32.0)
    assert rope.scaling.original_max_position == 4096
    assert not rope.scaling.truncate


def test_phi_moe_has_an_amplitude_for_each_set_of_factors(tiny_values: Any) -> None:
    values = tiny_values("phimoe")
    config = config_from_hf(values)
    for context, amplitude, factors in ((32, 1.2, "short_factor"), (33, 1.3, "long_factor")):
        rope = config.for_context(context).layers[0].mixer.rope
        assert rope.amplitude == amplitude
        assert list(rope.scaling.factors) == values["rope_scaling"][factors]
    assert config_from_dict(config_to_dict(config)) == config
    microsofts = values | {"architectures": ["PhiMoEForCausalLM"], "auto_map": {"AutoConfig": "x"}}
    assert config_from_hf(microsofts) == config


def test_a_bias_of_the_output_layer_rules_out_what_leaves_it_out(
    tiny_values: Any, tiny_checkpoint: Any
) -> None:
    tied = config_from_hf(tiny_values("phimoe") | {"tie_word_embeddings": True})
    assert tied.output_bias
    assert not can_bound_logits(tied)
    assert can_bound_logits(dataclasses.replace(tied, output_bias=False))
    assert open_model(tiny_checkpoint("phimoe"), "float32").output_rows is None


def test_layers_of_hunyuan_may_choose_differently_many_experts(tiny_values: Any) -> None:
    layers = config_from_hf(tiny_values("hunyuan_moe")).layers
    assert [layer.feed_forward.router.num_chosen for layer in layers] == [2, 3, 2]
    once = config_from_hf(tiny_values("hunyuan_moe") | {"moe_topk": 2}).layers
    assert set(once) == {layers[0]}


def test_norms_behind_the_rotary_embedding_are_of_each_head() -> None:
    with pytest.raises(ModelLoadError, match="qk_norm_last"):
        Attention(num_heads=1, num_kv_heads=1, head_dim=8, rope=None, qk_norm_last=True)


def test_kimi_k2_is_read_as_a_deepseek_v3(tiny_values: Any) -> None:
    values = tiny_values("deepseek_v3")
    own_code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}  # which is never run
    kimi = values | {"model_type": "kimi_k2", "auto_map": own_code}
    assert config_from_hf(kimi) == config_from_hf(values)
    assert config_from_hf(kimi | {"architectures": None, "auto_map": None}) == config_from_hf(
        values
    )


def test_a_stretched_context_scales_scores_and_leaves_rotations_alone(tiny_values: Any) -> None:
    values = tiny_values("deepseek_v3")
    stretched = config_from_hf(values).layers[0].mixer
    plain = config_from_hf(values | {"rope_scaling": None}).layers[0].mixer
    assert plain.scale == (12 + 8) ** -0.5
    assert stretched.scale == pytest.approx(plain.scale * (0.1 * math.log(8.0) + 1.0) ** 2)
    assert stretched.rope.amplitude == 1.0  # mscale is mscale_all_dim


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is not supported"),
        ("qwen3_moe", {"n_group": 2}, "n_group = 2 is not supported"),
        ("mixtral", {"hidden_act": "relu2"}, "hidden_act = 'relu2'"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list = [1, 0] is not supported"),
        ("ernie4_5_moe", {"moe_gate": "expert_choice"}, "moe_gate = 'expert_choice'"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min = 0.5"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk = 2048 is not supported"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = True"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("deepseek_v3", {"qk_head_dim": 16}, "qk_head_dim = 16"),
        ("deepseek_v3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("deepseek_v3", {"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM"),
        ("glm4_moe_lite", {"architectures": ["GlmMoeDsaForCausalLM"]}, "GlmMoeDsaForCausalLM"),
        ("phimoe", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported: 2"),
        ("phimoe", {"mlp_bias": True}, "mlp_bias = True"),
        ("hunyuan", {"use_cla": True}, "use_cla = True is not supported: False"),
        ("hunyuan", {"use_qk_norm": False}, "use_qk_norm = False is not supported: True"),
        ("hunyuan", {"attention_head_dim": 8}, "attention_head_dim = 8 is not supported: 16"),
        ("hunyuan", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
        ("hunyuan", {"rope_scaling": {"type": "yarn", "alpha": 2.0}}, "'yarn' is not supported"),
        ("hunyuan", {"rope_scaling": {"type": "dynamic", "alpha": 2.0, "gamma": 1}}, "gamma = 1"),
        ("hunyuan_moe", {"num_shared_expert": [1, 2, 1]}, "num_shared_expert = [1, 2, 1]"),
        ("hunyuan_moe", {"moe_intermediate_size": 16}, "moe_intermediate_size = 16"),
        ("hunyuan_moe", {"mlp_bias": True}, "mlp_bias = True"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "'awq'"),
        ("gpt_oss", {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new'"),
    ],
)
def test_mathematics_that_are_not_implemented_are_refused_by_name(
    name: str, changes: dict[str, Any], words: str, tiny_values: Any
) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        config_from_hf(tiny_values(name) | changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("hunyuan_moe", {"moe_topk": [2, 3]}, "moe_topk = [2, 3] is not allowed: one for each"),
        ("hunyuan_moe", {"moe_topk": [2, 0, 2]}, "moe_topk = 0 is not allowed"),
        ("hunyuan", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "alpha = -1.0"),
        ("qwen3_moe", {"num_experts": None}, "lacks num_experts"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "lacks num_experts_per_tok"),
        ("qwen3_moe", {"num_experts": 0}, "num_experts = 0 is not allowed: an integer from 1"),
        ("qwen3_moe", {"num_local_experts": 4}, "num_experts = 8 and num_local_experts = 4"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_chosen = 9 is not allowed"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers = [2] is not allowed"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1 is not allowed"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "lacks moe_intermediate_size"),
        ("glm4_moe", {"n_group": 3}, "num_groups = 3 is not allowed: a divisor of num_experts (8)"),
        ("glm4_moe", {"topk_group": 5}, "num_chosen_groups = 5 is not allowed"),
        ("glm4_moe", {"topk_group": 1}, "num_chosen = 3 is not allowed: at most 2"),
        ("glm4_moe", {"first_k_dense_replace": 4}, "first_k_dense_replace = 4 is not allowed"),
        ("glm4_moe", {"routed_scaling_factor": -1.0}, "routed scale = -1.0"),
        ("deepseek_v3", {"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ("deepseek_v3", {"v_head_dim": None}, "lacks v_head_dim"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "partial_rotary_factor = 1.0 is not allowed"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0 is not allowed"),
        ("deepseek_v3", {"n_group": 8}, "num_groups = 8 is not allowed: 2 experts a group"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types = ['sparse']"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "moe", "dense"]}, "mlp_layer_types = "),
        ("minimax_m2", {"rotary_dim": 24}, "partial_rotary_factor = 1.5"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "gate_limit = 0.0"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_with_its_value(
    name: str, changes: dict[str, Any], words: str, tiny_values: Any
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        config_from_hf(tiny_values(name) | changes)
    assert words in str(caught.value)
