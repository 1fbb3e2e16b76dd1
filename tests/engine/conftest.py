"""Fixtures of the engine's tests: a tiny model on disk, and engines over it that must end clean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

VOCAB = 272
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 32, 64, 2, 8, 4, 8
CONTEXT = 512


def write_tiny_model(
    directory: Path,
    seed: int = 0,
    is_tied: bool = False,
    num_experts: int = 0,
    has_latents: bool = False,
) -> Path:
    """Writes config, weights and a byte-level tokenizer; greedy texts do not repeat at once.

    Args:
        is_tied: whether the output layer is the embedding table.
        num_experts: of each layer, two a token; 0 is a Llama, without any.
        has_latents: attention is over latents: a DeepSeek V3, with experts.
    """
    rng = np.random.default_rng(seed)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": is_tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    if num_experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": num_experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": MLP,
            "norm_topk_prob": True,
        }
    if has_latents:
        config |= LATENTS | {"num_experts": None, "head_dim": None, "num_key_value_heads": HEADS}
    (directory / "config.json").write_text(json.dumps(config))

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN) * 4,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": normal(VOCAB, HIDDEN) * 8,
    }
    if is_tied:
        del tensors["lm_head.weight"]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        }
        if has_latents:
            tensors |= {prefix + name: value for name, value in _of_latents(normal).items()}
        else:
            tensors |= {
                prefix + "self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN) * 2,
                prefix + "self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN) * 2,
                prefix + "self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN) * 2,
                prefix + "self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM) * 2,
            }
        experts = [f"mlp.experts.{expert}." for expert in range(num_experts)]
        for mlp in experts or ["mlp."]:
            tensors |= {
                prefix + mlp + "gate_proj.weight": normal(MLP, HIDDEN),
                prefix + mlp + "up_proj.weight": normal(MLP, HIDDEN),
                prefix + mlp + "down_proj.weight": normal(HIDDEN, MLP),
            }
        if experts:
            tensors[prefix + "mlp.gate.weight"] = normal(num_experts, HIDDEN) * 4
        if experts and not has_latents:
            tensors |= {
                prefix + "self_attn.q_norm.weight": np.ones(HEAD_DIM, np.float32) * 2,
                prefix + "self_attn.k_norm.weight": np.ones(HEAD_DIM, np.float32) * 2,
            }
    save_file(tensors, str(directory / "model.safetensors"))
    _tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": _TEMPLATE})
    )
    return directory


LATENTS = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 0,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}


def _of_latents(normal: Callable[..., np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of a layer's attention and shared expert, and what corrects its router."""
    return {
        "self_attn.q_a_proj.weight": normal(20, HIDDEN),
        "self_attn.q_a_layernorm.weight": np.ones(20, np.float32),
        "self_attn.q_b_proj.weight": normal(HEADS * 20, 20) * 2,
        "self_attn.kv_a_proj_with_mqa.weight": normal(24 + 8, HIDDEN) * 2,
        "self_attn.kv_a_layernorm.weight": np.ones(24, np.float32),
        "self_attn.kv_b_proj.weight": normal(HEADS * 28, 24) * 2,
        "self_attn.o_proj.weight": normal(HIDDEN, HEADS * 16) * 2,
        "mlp.gate.e_score_correction_bias": normal(8) * 0.1,
        "mlp.shared_experts.gate_proj.weight": normal(MLP, HIDDEN),
        "mlp.shared_experts.up_proj.weight": normal(MLP, HIDDEN),
        "mlp.shared_experts.down_proj.weight": normal(HIDDEN, MLP),
    }


_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def _tokenizer() -> tokenizers.Tokenizer:
    specials = ["<s>", "</s>"] + [f"<reserved{i}>" for i in range(14)]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *alphabet])}
    assert len(vocab) == VOCAB
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(s, special=True) for s in specials])
    return tokenizer


@pytest.fixture(scope="session")
def first_layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The packaged model's first two layers, as a checkpoint: what packed weights compile to takes
    a second a layer."""
    from octavo.models.packaged import PACKAGED_MODELS

    packaged = PACKAGED_MODELS["smollm2-135m"]
    if not packaged.is_installed():
        pytest.skip("smollm2-135m is not installed")
    gguf = pytest.importorskip("gguf")
    path, num_layers = tmp_path_factory.mktemp("first_layers") / "model.gguf", 2
    whole = gguf.GGUFReader(packaged.path())
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in whole.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = num_layers if name == "llama.block_count" else field.contents()
        kind, *of = field.types
        writer.add_key_value(name, value, kind, of[0] if of else None)
    for tensor in whole.tensors:
        block, *parts = tensor.name.split(".")
        if block != "blk" or int(parts[0]) < num_layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_llama"))


SMALL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "fail_on_compile": True,
    "warm_up": "coarse",
}
"""Engine arguments that compile few, small programs; compiling later is an error.

A program takes seconds, and most of the time that these tests take. A test of what the finer
programs compute says so: `warm_up="full"`."""


@pytest.fixture(scope="session")
def tiny_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen 3 with eight experts a layer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny_experts"), num_experts=8)


@pytest.fixture(scope="session")
def tiny_latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer DeepSeek V3 with eight experts a layer."""
    path = tmp_path_factory.mktemp("tiny_latents")
    return write_tiny_model(path, num_experts=8, has_latents=True)


@pytest.fixture
def make_llm(tiny_model: Path) -> Iterator[Callable[..., Any]]:
    """Builds an LLM over the tiny model; afterwards every page must be accounted for."""
    from octavo import LLM

    made = []

    def make(**changes: Any) -> LLM:
        llm = LLM(**{"model": str(tiny_model), "progress": False, **SMALL, **changes})
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()
        llm.engine.check_integrity()
        load = llm.engine.load()
        assert load.num_free_pages == load.num_total_pages
        assert load.num_running == load.num_waiting == 0
        assert load.compiles_after_ready == 0
        assert llm.engine.core.num_bugs == 0
