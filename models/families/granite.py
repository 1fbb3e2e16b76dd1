"""Granite 3: Llama whose embeddings, attention, residual sums and logits are multiplied."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.checks import check_positive
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope


def read(fields: ConfigFields) -> ModelConfig:
    """A Granite 3 of a config.json's fields."""
    bias = fields.boolean("attention_bias", default=False)
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields),
        scale=_multiplier(fields, "attention_multiplier"),
        qkv_bias=bias,
        out_bias=bias,
    )
    norms = Norms(
        norm=RMSNorm(eps=family.epsilon(fields)),
        residual_scale=_multiplier(fields, "residual_multiplier"),
    )
    embedding = _multiplier(fields, "embedding_multiplier")
    logits = _multiplier(fields, "logits_scaling")
    layer = family.layer(attention, family.gated_mlp(fields), norms)
    return family.model(
        fields,
        [layer] * family.num_layers(fields),
        norms,
        embedding_scale=None if embedding == 1.0 else embedding,
        logit_scale=None if logits == 1.0 else 1.0 / logits,
    )


def _multiplier(fields: ConfigFields, name: str) -> float:
    value: float = fields.number(name, default=1.0)
    check_positive(name, value)
    return value


def _from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": metadata.decimal(
            "attention.scale", 1.0 / math.sqrt(fields["head_dim"])
        ),
        "embedding_multiplier": metadata.decimal("embedding_scale"),
        "residual_multiplier": metadata.decimal("residual_scale"),
        "logits_scaling": metadata.decimal("logit_scale"),
    }


GRANITE = family.Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    read=read,
    models="Granite 3",
    gguf="granite",
    gguf_pairs=True,
    gguf_keys=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    gguf_fields=_from_gguf,
)
