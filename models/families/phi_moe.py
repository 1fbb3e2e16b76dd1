"""Phi-3.5-MoE: norms with biases, a bias of the output layer, and a router that chooses one expert
after the other."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.norms import LayerNorm, Norms
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope

_THETA = 1_000_000.0
_NUM_CHOSEN = 2
"""Experts of a token: transformers chooses two, whatever a file says."""


def read(fields: ConfigFields) -> ModelConfig:
    """A Phi-3.5-MoE of a config.json's fields."""
    bias = fields.boolean("attention_bias", default=False)
    window = fields.size("sliding_window", default=None)
    longest = fields.size("max_position_embeddings")
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields, _THETA, has_mscales=True),
        # Released files name a window as long as the context.
        sliding_window=None if window is None or window >= longest else window,
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.ignore("original_max_position_embeddings")  # of a context that is not stretched
    fields.only("num_experts_per_tok", _NUM_CHOSEN)
    fields.ignore("input_jitter_noise")  # of training
    experts = Experts(
        router=expert_fields.router(
            fields,
            scores="sparse_mixer",
            normalizes=False,
            jitter=fields.number("router_jitter_noise", default=0.01),
        ),
        intermediate_size=fields.size("intermediate_size"),
        activation=family.activation(fields),
        names="mixtral",
    )
    norms = Norms(norm=LayerNorm(eps=family.epsilon(fields, 1e-5), bias=True))
    layer = family.layer(attention, experts, norms)
    return family.model(
        fields,
        [layer] * family.num_layers(fields),
        norms,
        output_bias=fields.boolean("lm_head_bias", default=False),
    )


PHI_MOE = family.Family(
    architecture="PhimoeForCausalLM",
    model_type="phimoe",
    aliases=("PhiMoEForCausalLM",),
    read=read,
    models="Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE",
    names_own_code=True,
)
