"""Tiny models as GGUF files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.models.blocks.experts import Experts
from octavo.models.blocks.norms import LayerNorm
from octavo.models.families.table import GGUF_ARCHITECTURES, config_from_hf

_ARCHITECTURES = {
    "llama": "llama",
    "smollm2": "llama",
    "llama3": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
    "granite": "granite",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "qwen3_moe": "qwen3moe",
    "ernie4_5": "ernie4_5",
    "ministral3": "mistral3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "exaone4": "exaone4",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "starcoder2": "starcoder2",
    "phi3": "phi3",
    "phi4_long": "phi3",
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}


def _gguf_name(name: str, has_post_norms: bool) -> str:
    norms = {"post_attention_layernorm": "ffn_norm"}
    if has_post_norms:
        norms = {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    stem, kind = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{(_NAMES | norms)[part]}.{kind}"


def _with_experts_stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One tensor for all experts of a layer."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        stacks.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(tensor)
    return {
        name: np.stack(parts) if ".experts." in name else parts[0] for name, parts in stacks.items()
    }


def _pairs_from_halves(tensor: np.ndarray, head_dim: int) -> np.ndarray:
    """The order llama's GGUF files store Q and K rows in."""
    halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def _add_widths(writer: gguf.GGUFWriter, feed_forward: Any) -> None:
    writer.add_feed_forward_length(feed_forward.intermediate_size)
    if isinstance(feed_forward, Experts):
        writer.add_expert_count(feed_forward.router.num_experts)
        writer.add_expert_used_count(feed_forward.router.num_chosen)
        writer.add_expert_feed_forward_length(feed_forward.intermediate_size)


def _add_yarn(writer: gguf.GGUFWriter, values: dict[str, Any]) -> None:
    scaling = values.get("rope_parameters") or values["rope_scaling"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    if "attention_factor" in scaling:
        writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
    if "mscale_all_dim" in scaling:
        writer.add_rope_scaling_yarn_log_mul(scaling["mscale_all_dim"])
    if "llama_4_scaling_beta" in scaling:
        writer.add_attn_temperature_scale(scaling["llama_4_scaling_beta"])


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny_values: Any, tiny_tensors: Any) -> Callable[..., Path]:
    """Name -> a GGUF file in float32 (or with matrices of another type where rows allow)."""

    def write(
        name: str,
        extra: Callable[[gguf.GGUFWriter], None] | None = None,
        path: Path | None = None,
        kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    ) -> Path:
        config = config_from_hf(tiny_values(name))
        architecture = _ARCHITECTURES[name]
        path = tmp_path / f"{name}.gguf" if path is None else path
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(config.num_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        whole = [one for one in config.layers if one.mixer.sliding_window is None]
        layer = (whole or config.layers)[0]
        windows = {one.mixer.sliding_window for one in config.layers} - {None}
        attention = layer.mixer
        rope = next(one.mixer.rope for one in (layer, *config.layers) if one.mixer.rope is not None)
        _add_widths(writer, layer.feed_forward)
        writer.add_head_count(attention.num_heads)
        writer.add_head_count_kv(attention.num_kv_heads)
        writer.add_key_length(attention.head_dim)
        writer.add_value_length(attention.head_dim)
        if isinstance(config.final_norm, LayerNorm):
            writer.add_layer_norm_eps(config.final_norm.eps)
        else:
            writer.add_layer_norm_rms_eps(config.final_norm.eps)
        writer.add_rope_freq_base(rope.theta)
        if rope.scaling is not None and rope.scaling.kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(rope.scaling.factor)
        for window in windows or ({0} if architecture == "phi3" else set()):
            writer.add_sliding_window(window)
        if rope.fraction != 1.0:
            writer.add_rope_dimension_count(rope.rotary_dim(attention.head_dim))
        if rope.scaling is not None and rope.scaling.kind == "yarn":
            _add_yarn(writer, tiny_values(name))
        if rope.scaling is not None and rope.scaling.kind == "longrope":
            writer.add_rope_scaling_orig_ctx_len(rope.scaling.original_max_position)
            writer.add_rope_scaling_attn_factors(rope.amplitude)
            for which, factors in (
                ("short", rope.scaling.factors), ("long", rope.scaling.long_factors)
            ):  # fmt: skip
                factors = np.asarray(factors, np.float32)
                writer.add_tensor(f"rope_factors_{which}.weight", factors)
        if architecture == "gemma2":
            writer.add_attn_logit_softcapping(attention.logit_softcap)
            writer.add_final_logit_softcapping(config.final_logit_softcap)
        if architecture in ("exaone4", "olmo2") and windows:
            slides = [one.mixer.sliding_window is not None for one in config.layers]
            writer.add_sliding_window_pattern(slides)
        if architecture in ("command-r", "cohere2"):
            writer.add_logit_scale(config.logit_scale)
        if architecture == "granite":
            writer.add_attention_scale(attention.scale)
            writer.add_embedding_scale(config.embedding_scale)
            writer.add_residual_scale(layer.norms.residual_scale)
            writer.add_logit_scale(1.0 / config.logit_scale)
        writer.add_bos_token_id(config.bos_token_id)
        writer.add_eos_token_id(config.eos_token_ids[0])
        writer.add_token_list([f"<{token}>" for token in range(config.vocab_size)])
        if extra is not None:
            extra(writer)
        for tensor_name, tensor in _with_experts_stacked(tiny_tensors(name)).items():
            offset = np.float32(config.final_norm.offset)
            stored = tensor + offset if "norm" in tensor_name else tensor
            if GGUF_ARCHITECTURES[architecture].gguf_pairs and (
                "q_proj" in tensor_name or "k_proj" in tensor_name
            ):
                stored = _pairs_from_halves(tensor, attention.head_dim)
            has_blocks = stored.ndim > 1 and stored.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
            of_kind = kind if has_blocks else gguf.GGMLQuantizationType.F32
            stored_name = _gguf_name(tensor_name, layer.norms.after)
            writer.add_tensor(stored_name, gguf.quants.quantize(stored, of_kind), raw_dtype=of_kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
