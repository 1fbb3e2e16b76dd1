"""Mistral: Llama whose layers may all have a sliding window."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope


def read(fields: ConfigFields) -> ModelConfig:
    """A Mistral of a config.json's fields."""
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields),
        sliding_window=fields.size("sliding_window", default=None),
    )
    mlp = MLP(
        intermediate_size=fields.size("intermediate_size"), activation=family.activation(fields)
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields)))
    layers = [family.layer(attention, mlp, norms)] * family.num_layers(fields)
    return family.model(fields, layers, norms)


MISTRAL = family.Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    read=read,
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)
