"""Hugging Face's config.json -> `ModelConfig`, for every architecture that is served.

Each field of the file must be read, known to be harmless, or be off: any other is refused by name,
because ignoring it would change the mathematics without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.config import MAX_LAYERS, LayerKind, ModelConfig
from octavo.models.config_fields import ConfigFields
from octavo.models.rope_fields import read_rope, read_rope_by_kind

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_LAYER_KINDS: dict[str, LayerKind] = {"full_attention": "global", "sliding_attention": "sliding"}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes.

    Args:
        values: the parsed file, as transformers 4 or 5 writes it.

    Raises:
        UnsupportedModelError: another architecture, remote code, or a field that is not supported,
            each by name.
        ModelLoadError: a field that is missing or malformed.
    """
    if values.get("auto_map"):
        raise UnsupportedModelError(
            "config.json: auto_map is not supported: Octavo never runs a checkpoint's code"
        )
    architecture = _architecture(values)
    fields = ConfigFields(values)
    common = _common(fields)
    config = ModelConfig(**(common | ARCHITECTURES[architecture](fields, common)))
    fields.refuse_unread()
    return config


def _architecture(values: Mapping[str, Any]) -> str:
    named = values.get("architectures")
    if isinstance(named, (list, tuple)) and named:
        if len(named) == 1 and isinstance(named[0], str) and named[0] in ARCHITECTURES:
            return named[0]
        raise UnsupportedModelError(
            f"config.json: architectures = {shorten(named)} is not supported: one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"config.json: model_type = {shorten(model_type)} is not supported: one of "
            f"{', '.join(MODEL_TYPES)}"
        )
    return MODEL_TYPES[model_type]


def _common(fields: ConfigFields) -> dict[str, Any]:
    """What every architecture says in the same words."""
    hidden, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", default=None) or hidden // num_heads
    activation = fields.text("hidden_activation", default=None)
    activation = fields.text("hidden_act", default=None) if activation is None else activation
    dtype = fields.text("dtype", default=None) or fields.text("torch_dtype", default=None)
    return {
        "vocab_size": fields.size("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.size("intermediate_size"),
        "num_layers": fields.size("num_hidden_layers", high=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": fields.size("num_key_value_heads", default=num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("rms_norm_eps", default=1e-6),
        "activation": _activation(activation),
        "max_position_embeddings": fields.size("max_position_embeddings"),
        "bos_token_id": fields.token_id("bos_token_id"),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        "checkpoint_dtype": dtype or "float32",
    }


def _activation(name: str | None) -> str | None:
    if name is not None and name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: hidden_act = {shorten(name)} is not supported: {', '.join(_ACTIVATIONS)}"
        )
    return None if name is None else _ACTIVATIONS[name]


def _llama(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    bias = fields.boolean("attention_bias", default=False)
    return {
        "activation": common["activation"] or "silu",
        "rope": read_rope(fields),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": fields.boolean("mlp_bias", default=False),
    }


def _mistral(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    window = fields.size("sliding_window", default=None)
    kind: LayerKind = "global" if window is None else "sliding"
    return {
        "activation": common["activation"] or "silu",
        "rope": read_rope(fields),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "sliding_window": window,
        "layer_kinds": (kind,) * common["num_layers"],
    }


def _qwen2(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    slides = fields.boolean("use_sliding_window", default=False)
    window = fields.integer("sliding_window", default=None)
    first_sliding = fields.integer("max_window_layers", default=28)
    slides = slides and window is not None

    def default_kind(layer: int) -> LayerKind:
        return "sliding" if slides and layer >= first_sliding else "global"

    return {
        "activation": common["activation"] or "silu",
        "rope": read_rope(fields),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=False),
        "qkv_bias": True,
        "sliding_window": window if slides else None,
        "layer_kinds": _layer_kinds(fields, common, default_kind),
    }


def _qwen3(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    bias = fields.boolean("attention_bias", default=False)
    specifics = {"qkv_bias": bias, "attention_out_bias": bias, "qk_norm": True}
    if fields.integer("head_dim", default=None) is None:
        raise ModelLoadError("config.json lacks head_dim")
    return _qwen2(fields, common) | specifics


def _gemma2(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    def default_kind(layer: int) -> LayerKind:
        return "global" if layer % 2 else "sliding"

    return _gemma(fields, common) | {
        "rope": read_rope(fields),
        "layer_kinds": _layer_kinds(fields, common, default_kind),
        "attn_logit_softcap": fields.number("attn_logit_softcapping", default=50.0, absent=None),
        "final_logit_softcap": fields.number("final_logit_softcapping", default=30.0, absent=None),
    }


def _gemma3(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    pattern = fields.size("_sliding_window_pattern", default=6)
    pattern = fields.size("sliding_window_pattern", default=pattern)

    def default_kind(layer: int) -> LayerKind:
        return "sliding" if (layer + 1) % pattern else "global"

    rope, local_rope = read_rope_by_kind(fields)
    return _gemma(fields, common) | {
        "qk_norm": True,
        "rope": rope,
        "local_rope": local_rope,
        "layer_kinds": _layer_kinds(fields, common, default_kind),
        "attn_logit_softcap": fields.number("attn_logit_softcapping", default=None),
        "final_logit_softcap": fields.number("final_logit_softcapping", default=None),
    }


def _gemma(fields: ConfigFields, common: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    fields.ignore("hidden_act")  # `hidden_activation` is the one in force
    window = fields.size("sliding_window", default=4096)
    if fields.integer("sliding_window_size", default=window) != window:
        raise ModelLoadError("config.json: sliding_window_size and sliding_window disagree")
    bias = fields.boolean("attention_bias", default=False)
    if fields.integer("head_dim", default=None) is None:
        raise ModelLoadError("config.json lacks head_dim")
    query_width = fields.number("query_pre_attn_scalar", default=256.0)
    if query_width <= 0:
        raise ModelLoadError(
            f"config.json: query_pre_attn_scalar = {query_width} is not allowed: above 0"
        )
    return {
        "activation": common["activation"] or "gelu_tanh",
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", default=True),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "post_norms": True,
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(common["hidden_size"]),
        "query_scale": 1.0 / math.sqrt(query_width),
        "sliding_window": window,
    }


def _layer_kinds(
    fields: ConfigFields, common: Mapping[str, Any], default_kind: Callable[[int], LayerKind]
) -> tuple[LayerKind, ...]:
    named = fields.raw("layer_types")
    if named is None:
        return tuple(default_kind(layer) for layer in range(common["num_layers"]))
    if not isinstance(named, (list, tuple)) or not all(
        isinstance(name, str) and name in _LAYER_KINDS for name in named
    ):
        raise UnsupportedModelError(
            f"config.json: layer_types = {shorten(named)} is not supported: a list of "
            f"{' and '.join(_LAYER_KINDS)}"
        )
    if len(named) != common["num_layers"]:
        raise ModelLoadError(
            f"config.json: layer_types = {len(named)} entries is not allowed: "
            f"{common['num_layers']}, by num_hidden_layers"
        )
    return tuple(_LAYER_KINDS[name] for name in named)


_Reader = Callable[[ConfigFields, Mapping[str, Any]], dict[str, Any]]
ARCHITECTURES: dict[str, _Reader] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
}
"""The entry of `architectures` -> how its fields read."""

MODEL_TYPES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
"""`model_type` -> architecture, for files that name no architecture."""
