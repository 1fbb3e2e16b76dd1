"""What Gemma 4 reads of its files, and what of it is refused, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.models.blocks.attention import Attention
from octavo.models.families.table import config_from_hf
from octavo.models.layers import rotary_frequencies
from octavo.models.loading.load import load_model
from octavo.models.rope import Rope

S, F = "sliding_attention", "full_attention"
E2B = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": {"hidden_size": 1024},
    "vision_config": {"hidden_size": 768},
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "text_config": {
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "layer_types": [S, S, S, S, F] * 7,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "final_logit_softcapping": 30.0,
        "enable_moe_block": False,
        "num_experts": None,
    },
}


def test_layers_of_a_composite_file_are_of_two_kinds_and_the_last_share_caches() -> None:
    config = config_from_hf(E2B)
    assert [config.layers[i].mixer.head_dim for i in (0, 4, 34)] == [256, 512, 512]
    assert len(config.own_caches()) == 15
    assert [config.layers[i].cache_of for i in (14, 15, 19, 34)] == [None, 13, 14, 14]
    widths = [config.layers[i].feed_forward.intermediate_size for i in (14, 15)]
    assert widths == [6144, 12288]
    assert config.layer_inputs is not None
    assert config.layer_inputs.size == 256
    # Of them, a token's products read 35 layers of E x P three times.
    tails = sum(layer.tail.num_weights(1536) for layer in config.layers)
    assert tails == 2 * 35 * 1536 * 256
    own = sum(layer.num_weights(1536) for layer in config.layers)
    assert config.num_layer_weights() == own + 35 * 1536 * 256


def test_heads_may_be_given_layer_by_layer(tiny_values: Any) -> None:
    values = tiny_values("gemma4_moe")
    for name in ("global_head_dim", "num_global_key_value_heads"):
        del values[name]
    whole = {"head_dim": 24, "num_key_value_heads": 1}
    values["per_layer_config"] = {"01": whole, "3": whole}
    assert config_from_hf(values) == config_from_hf(tiny_values("gemma4_moe"))


def test_the_last_layer_sees_everything_whatever_the_file_says(tiny_values: Any) -> None:
    values = tiny_values("gemma4_moe")
    values["layer_types"] = [S, F, S, S]
    assert config_from_hf(values) == config_from_hf(tiny_values("gemma4_moe"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers = 8 is not allowed: 0 to 7"),
        ({"num_kv_shared_layers": 7}, "num_kv_shared_layers = 7 is not supported: fewer"),
        ({"per_layer_config": {"9": {}}}, "per_layer_config of '9' is not allowed"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "sliding_window = 3 is not supported"),
        ({"per_layer_config": [1]}, "per_layer_config = [1] is not allowed"),
        ({"enable_moe_block": True}, "lacks num_experts"),
        ({"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input = -1"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v = 1 is not allowed: true or false"),
        ({"layer_types": [S] * 8}, "num_kv_shared_layers = 4 is not supported"),
    ],
)
def test_what_is_not_implemented_or_malformed_is_refused_by_name(
    changes: dict[str, Any], words: str, tiny_values: Any
) -> None:
    with pytest.raises((ModelLoadError, UnsupportedModelError)) as caught:
        config_from_hf(tiny_values("gemma4") | changes)
    assert words in str(caught.value)


def test_keys_that_nothing_reads_are_ignored_of_layers_that_share_a_cache(
    tiny_checkpoint: Callable[..., Any], tiny_tensors: Callable[..., dict[str, np.ndarray]]
) -> None:
    tensors = tiny_tensors("gemma4")
    unread = {"model.layers.5.self_attn.k_proj.weight": np.ones((16, 32), np.float32)}
    load_model(tiny_checkpoint("gemma4", tensors | unread), "float32")
    needless = {"model.layers.5.self_attn.z_proj.weight": np.ones((16, 32), np.float32)}
    with pytest.raises(ModelLoadError, match="z_proj"):
        load_model(tiny_checkpoint("gemma4", tensors | needless), "float32")


def test_proportional_frequencies_are_the_first_of_a_whole_head() -> None:
    whole = rotary_frequencies(Rope(theta=1e6), 64)
    part = rotary_frequencies(Rope(theta=1e6, fraction=0.25, proportional=True), 64)
    np.testing.assert_array_equal(part[:8], whole[:8])
    assert not part[8:].any()
    with pytest.raises(ModelLoadError, match="proportional"):
        Rope(proportional=True, pairs=True)


def test_values_that_are_keys_must_lie_on_disk_as_keys_do() -> None:
    with pytest.raises(ModelLoadError, match="values_are_keys"):
        Attention(
            num_heads=2, num_kv_heads=1, head_dim=8, rope=Rope(fraction=0.5), values_are_keys=True
        )
