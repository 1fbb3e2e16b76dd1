"""MiniCPM 3: DeepSeek's attention with a plain MLP, and Granite's multipliers by other names."""

from __future__ import annotations

import math

from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import family, latent_fields
from octavo.models.families.config_fields import ConfigFields


def read(fields: ConfigFields) -> ModelConfig:
    """A MiniCPM 3 of a config.json's fields."""
    number, hidden_size = family.num_layers(fields), fields.size("hidden_size")
    depth = fields.number("scale_depth", default=1.4, absent=math.sqrt(number))
    base = fields.number("dim_model_base", default=256.0, absent=float(hidden_size))
    norms = Norms(
        norm=RMSNorm(eps=family.epsilon(fields, 1e-5)), residual_scale=depth / math.sqrt(number)
    )
    value_size = hidden_size // fields.size("num_attention_heads")
    attention = latent_fields.attention(fields, pairs=False, value_size=value_size)
    layers = [family.layer(attention, family.gated_mlp(fields), norms)] * number
    return family.model(
        fields,
        layers,
        norms,
        tied=True,
        embedding_scale=fields.number("scale_emb", default=12.0),
        logit_scale=base / hidden_size,
    )


MINICPM3 = family.Family(
    architecture="MiniCPM3ForCausalLM",
    model_type="minicpm3",
    read=read,
    models="MiniCPM3-4B",
    names_own_code=True,
)
