"""A Gemma 4 of all its ingredients, served: heads that are wider in layers without a window, keys
that are values, caches that several layers read, inputs for each layer, experts beside an MLP.

That each computes what it should is compared with transformers elsewhere. Here the engine must say
the same whatever befalls a request.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from octavo.engine.execution.state import kv_bytes_per_token
from octavo.engine.sampling_params import SamplingParams
from octavo.models.config import ModelConfig
from octavo.models.config_dict import config_from_dict, config_to_dict
from octavo.models.families.table import config_from_hf
from tests.engine.alone import check_variety, draw_weights, one_by_one, save_model, tokens_of

NUM_TOKENS = 24
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SLIDES, WHOLE = "sliding_attention", "full_attention"
VALUES = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layer_types": [SLIDES, WHOLE, SLIDES, WHOLE],
    "sliding_window": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_global_key_value_heads": 2,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": 272,
    "hidden_size_per_layer_input": 12,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 20,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return config_from_hf(VALUES)


@pytest.fixture(scope="module")
def checkpoint(
    config: ModelConfig, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Path:
    path = tmp_path_factory.mktemp("gemma4") / "model"
    return save_model(path, config, draw_weights(config), tiny_model)


def prompts() -> list[list[int]]:
    """Prompts of 1 to 150 tokens; half of them share a beginning."""
    rng = random.Random(11)
    shared = [rng.randrange(16, 272) for _ in range(40)]
    made = [[20]]
    for index in range(9):
        own = [rng.randrange(16, 272) for _ in range(rng.randrange(1, 110))]
        made.append((shared if index % 2 else []) + own)
    return made


def generated(llm: Any) -> list[list[int]]:
    return tokens_of(llm, prompts(), PARAMS)


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    found = one_by_one(checkpoint, prompts(), PARAMS)
    check_variety(found)
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunks of 16": {"max_num_seqs": 4, "max_num_batched_tokens": 16},
    "eight steps a dispatch": {"num_decode_steps": 8},
    "two devices": {"tensor_parallel_size": 2},
    "four devices": {"tensor_parallel_size": 4},
}
# Each compiles for long: all of them are `make models`.
TRIES_ALL = os.environ.get("OCTAVO_MODELS") == "1"
TRIED = SETTINGS if TRIES_ALL else ["four devices"]


@pytest.mark.parametrize("setting", TRIED)
def test_tokens_are_those_of_the_request_alone(
    setting: str, make_llm: Callable[..., Any], checkpoint: Path, alone: list[list[int]]
) -> None:
    llm = make_llm(model=str(checkpoint), **SETTINGS[setting])
    assert generated(llm) == alone
    assert generated(llm) == alone  # whose beginnings come from the prefix cache
    assert llm.engine.load().prefix_cache_hits > 0


@pytest.mark.parametrize("host_kv_memory_bytes", [0, 4 << 20] if TRIES_ALL else [0])
def test_tokens_survive_preemption(
    host_kv_memory_bytes: int,
    make_llm: Callable[..., Any],
    checkpoint: Path,
    alone: list[list[int]],
) -> None:
    llm = make_llm(
        model=str(checkpoint),
        num_kv_pages=16,
        block_size=16,
        watermark=0.0,
        max_model_len=192,
        host_kv_memory_bytes=host_kv_memory_bytes,
    )
    assert generated(llm) == alone
    assert llm.engine.load().num_preemptions > 0


@pytest.mark.skipif(not TRIES_ALL, reason="compiles for long: `make models`")
def test_weights_of_eight_bits(make_llm: Callable[..., Any], checkpoint: Path) -> None:
    expected = one_by_one(checkpoint, prompts(), PARAMS, quantization="int8")
    llm = make_llm(model=str(checkpoint), quantization="int8")
    same = [a == b for a, b in zip(generated(llm), expected, strict=True)]
    # Rounded weights bring ties nearer, and other programs sum in another order.
    assert sum(same) >= len(same) - 1


def test_layers_that_read_a_cache_take_no_room(config: ModelConfig) -> None:
    sliding, whole = 4 * 8, 2 * 16
    assert kv_bytes_per_token(config, jnp.dtype("float32")) == 4 * 2 * (sliding + whole)
    assert [layer.cache_of for layer in config.layers] == [None, None, 0, 1]


def test_a_stored_configuration_means_the_same_model(config: ModelConfig) -> None:
    assert config_from_dict(config_to_dict(config)) == config
