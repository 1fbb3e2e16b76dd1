"""Gemma 1 to 3: scaled embeddings; from Gemma 2 on norms on both sides, and layers with and without
a window."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope, read_rope_by_kind
from octavo.models.rope import Rope

GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
GEMMA3_GLOBAL_EVERY = 6
GLOBAL_THETA = 1_000_000.0


def read_gemma(fields: ConfigFields) -> ModelConfig:
    """A Gemma 1 of a config.json's fields, whose "gelu" has always been its approximation."""
    activation = family.activation(fields, "gelu_tanh", {"gelu": "gelu_tanh"})
    fields.ignore("hidden_act")  # `hidden_activation` is the one in force, if there are both
    bias = fields.boolean("attention_bias", default=False)
    family.need_head_dim(fields)
    attention = Attention(
        **family.heads(fields), rope=read_rope(fields), qkv_bias=bias, out_bias=bias
    )
    mlp = MLP(intermediate_size=fields.size("intermediate_size"), activation=activation)
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields), offset=1.0))
    return family.model(
        fields,
        [family.layer(attention, mlp, norms)] * family.num_layers(fields),
        norms,
        tied=True,
        embedding_scale=math.sqrt(fields.size("hidden_size")),
    )


def read_gemma2(fields: ConfigFields) -> ModelConfig:
    """A Gemma 2 of a config.json's fields: every other layer slides; logits are capped."""
    return _read(
        fields,
        rope=(read_rope(fields),) * 2,
        slides=family.slides(fields, lambda layer: layer % 2 == 0),
        logit_softcap=fields.number("attn_logit_softcapping", default=50.0, absent=None),
        final_logit_softcap=fields.number("final_logit_softcapping", default=30.0, absent=None),
    )


def read_gemma3(fields: ConfigFields) -> ModelConfig:
    """A Gemma 3 of a config.json's fields: five of six layers slide, by another rotary base."""
    every = fields.size("_sliding_window_pattern", default=GEMMA3_GLOBAL_EVERY)
    every = fields.size("sliding_window_pattern", default=every)
    return _read(
        fields,
        rope=read_rope_by_kind(fields, GLOBAL_THETA),
        slides=family.slides(fields, lambda layer: (layer + 1) % every != 0),
        logit_softcap=fields.number("attn_logit_softcapping", default=None),
        final_logit_softcap=fields.number("final_logit_softcapping", default=None),
        qk_norm=True,
    )


def _read(
    fields: ConfigFields,
    *,
    rope: tuple[Rope, Rope],
    slides: list[bool],
    logit_softcap: float | None,
    final_logit_softcap: float | None,
    qk_norm: bool = False,
) -> ModelConfig:
    """What the two share. `rope` is that of global and that of sliding layers."""
    activation = family.activation(fields, "gelu_tanh")
    fields.ignore("hidden_act")  # `hidden_activation` is the one in force
    window = fields.size("sliding_window", default=4096)
    if fields.integer("sliding_window_size", default=window) != window:
        raise ModelLoadError(f"{fields.where}: sliding_window_size and sliding_window disagree")
    family.need_head_dim(fields)
    query_width = fields.number("query_pre_attn_scalar", default=256.0)
    if query_width <= 0:
        raise ModelLoadError(
            f"{fields.where}: query_pre_attn_scalar = {query_width} is not allowed: above 0"
        )
    bias = fields.boolean("attention_bias", default=False)
    norm = RMSNorm(eps=family.epsilon(fields), offset=1.0)
    norms = Norms(norm=norm, before=True, after=True)
    mlp = MLP(intermediate_size=fields.size("intermediate_size"), activation=activation)
    by_kind = {
        slide: Attention(
            **family.heads(fields),
            rope=rope[slide],
            sliding_window=window if slide else None,
            logit_softcap=logit_softcap,
            scale=1.0 / math.sqrt(query_width),
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm if qk_norm else None,
        )
        for slide in (False, True)
    }
    return family.model(
        fields,
        [family.layer(by_kind[slide], mlp, norms) for slide in slides],
        norms,
        tied=True,
        embedding_scale=math.sqrt(fields.size("hidden_size")),
        final_logit_softcap=final_logit_softcap,
    )


def _gguf_query_width(fields: Mapping[str, Any], num_layers_27b: int) -> float:
    """The largest of each scales queries by hidden_size / num_heads."""
    if fields["num_hidden_layers"] == num_layers_27b:
        return float(fields["hidden_size"] / fields["num_attention_heads"])
    return float(fields["head_dim"])


def _gemma2_from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gguf_query_width(fields, GEMMA2_27B_LAYERS),
        "sliding_window": metadata.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", float, 50.0),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", float, 30.0),
    }


def _gemma3_from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _gguf_query_width(fields, GEMMA3_27B_LAYERS),
        "sliding_window": metadata.size("attention.sliding_window"),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", float, 10000.0),
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", float),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", float),
        **metadata.layer_types(fields["num_hidden_layers"], GEMMA3_GLOBAL_EVERY),
    }


_GGUF_KEYS = frozenset(
    {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
)
GEMMA = family.Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    read=read_gemma,
    models="Gemma 1",
    gguf="gemma",
)
GEMMA2 = family.Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    read=read_gemma2,
    models="Gemma 2",
    gguf="gemma2",
    gguf_keys=_GGUF_KEYS,
    gguf_fields=_gemma2_from_gguf,
)
GEMMA3 = family.Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    read=read_gemma3,
    models="Gemma 3",
    real="Gemma 3 270M (GGUF)",
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
    gguf="gemma3",
    gguf_keys=_GGUF_KEYS | {"attention.sliding_window_pattern", "rope.freq_base_swa"},
    gguf_fields=_gemma3_from_gguf,
)
