"""Mistral: Llama whose layers may have a sliding window; Ministral, where some of them have one;
Ministral 3, whose queries grow with their positions; Mistral Small 4, where they do, too, over
DeepSeek's attention and routed experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import deepseek, expert_fields, family, latent_fields
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope
from octavo.models.rope import Rope


def read(fields: ConfigFields) -> ModelConfig:
    """A Mistral of a config.json's fields."""
    return _read(fields, read_rope(fields), [True] * family.num_layers(fields))


def read_ministral(fields: ConfigFields) -> ModelConfig:
    """A Ministral of a config.json's fields."""
    return _read(fields, read_rope(fields), family.slides(fields, lambda layer: True))


def read_ministral3(fields: ConfigFields) -> ModelConfig:
    """A Ministral 3 of a config.json's fields."""
    rope = read_rope(fields, default=_YARN, has_temperature=True)
    return _read(fields, rope, [True] * family.num_layers(fields))


def read_mistral4(fields: ConfigFields) -> ModelConfig:
    """A Mistral Small 4 of a config.json's fields."""
    attention = latent_fields.attention(
        fields,
        pairs=deepseek.interleaves(fields),
        default=_YARN_4,
        has_temperature=True,
        whole_head=True,
    )
    router = expert_fields.router(
        fields,
        normalizes=fields.boolean("norm_topk_prob", default=True),
        scale=fields.number("routed_scaling_factor", default=1.0),
        **deepseek.groups_of(fields),
    )
    return deepseek.read_with_experts(fields, attention, router, num_dense=0)


def _read(fields: ConfigFields, rope: Rope, slides: list[bool]) -> ModelConfig:
    """What they share; `slides` says which layers have the window, if there is one."""
    plain = Attention(**family.heads(fields), rope=rope)
    window = fields.size("sliding_window", default=None)
    sliding = dataclasses.replace(plain, sliding_window=window)
    mlp = family.gated_mlp(fields)
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields)))
    layers = [family.layer(sliding if slide else plain, mlp, norms) for slide in slides]
    return family.model(fields, layers, norms)


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The rotary embedding of a Ministral 3 that says none."""
_YARN_4 = _YARN | {
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}
"""The rotary embedding of a Mistral Small 4 that says none."""


def _ministral3_from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Files of Mistral Small 3 say that they are Ministral 3, too, and have none of this."""
    beta = metadata.decimal("attention.temperature_scale")
    scaling = fields.get("rope_scaling") or {"rope_type": "default"}
    return {"rope_scaling": {**scaling, "llama_4_scaling_beta": beta}}


_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MISTRAL = family.Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    read=read,
    models="Mistral, Mistral Small 3, Mistral Nemo",
    defaults=_DEFAULTS
    | {"vocab_size": 32000, "num_hidden_layers": 32, "max_position_embeddings": 131072},
)
MINISTRAL = family.Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    read=read_ministral,
    models="Ministral 8B (2024)",
)
MINISTRAL3 = family.Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    read=read_ministral3,
    models="Ministral 3",
    gguf="mistral3",
    gguf_pairs=True,
    gguf_keys=frozenset({"attention.temperature_scale"}),
    gguf_fields=_ministral3_from_gguf,
    defaults=_DEFAULTS
    | {
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
    },
)
MISTRAL4 = family.Family(
    architecture="Mistral4ForCausalLM",
    model_type="mistral4",
    read=read_mistral4,
    models="the text model of Mistral Small 4",
)
