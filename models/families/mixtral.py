"""Mixtral: Mistral with routed experts in place of every MLP."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope

_THETA = 1_000_000.0


def read(fields: ConfigFields) -> ModelConfig:
    """A Mixtral of a config.json's fields."""
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields, _THETA),
        sliding_window=fields.size("sliding_window", default=None),
    )
    experts = Experts(
        router=expert_fields.router(fields),
        intermediate_size=fields.size("intermediate_size"),
        activation=family.activation(fields),
        names="mixtral",
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields)))
    layers = [family.layer(attention, experts, norms)] * family.num_layers(fields)
    return family.model(fields, layers, norms)


MIXTRAL = family.Family(architecture="MixtralForCausalLM", model_type="mixtral", read=read)
