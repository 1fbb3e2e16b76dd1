"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope


def read(fields: ConfigFields) -> ModelConfig:
    """A Seed-OSS of a config.json's fields."""
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields),
        qkv_bias=fields.boolean("attention_bias", default=True),
        out_bias=fields.boolean("attention_out_bias", default=False),
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields)))
    layer = family.layer(attention, family.gated_mlp(fields), norms)
    return family.model(fields, [layer] * family.num_layers(fields), norms)


SEED_OSS = family.Family(
    architecture="SeedOssForCausalLM", model_type="seed_oss", read=read, models="Seed-OSS"
)
