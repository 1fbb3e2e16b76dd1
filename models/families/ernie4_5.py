"""ERNIE 4.5, dense: Llama whose heads are rotated in pairs."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope


def read(fields: ConfigFields) -> ModelConfig:
    """An ERNIE 4.5 of a config.json's fields."""
    bias = fields.boolean("use_bias", default=False)
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields, 500_000.0, pairs=True),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp = MLP(
        intermediate_size=fields.size("intermediate_size"),
        activation=family.activation(fields),
        bias=bias,
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields, 1e-5)))
    layer = family.layer(attention, mlp, norms)
    return family.model(fields, [layer] * family.num_layers(fields), norms, tied=True)


ERNIE4_5 = family.Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    read=read,
    models="ERNIE 4.5 (dense)",
    gguf="ernie4_5",
)
