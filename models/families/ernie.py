"""ERNIE 4.5 with routed experts: heads rotated in pairs, corrected softmax, shared experts."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope

_THETA = 500_000.0
_LEAST_SUM = 1e-12
"""What a sum of shares is at least, before they are divided by it; no softmax is near."""


def read(fields: ConfigFields) -> ModelConfig:
    """An ERNIE 4.5 with experts, of a config.json's fields."""
    bias = fields.boolean("use_bias", default=False)
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields, _THETA, pairs=True),
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.only("moe_norm_min", _LEAST_SUM)
    fields.only("moe_gate", "topk")
    fields.only("use_rmsnorm", True)
    fields.only("moe_use_aux_free", True)
    fields.ignore("moe_capacity")  # of training: none is dropped
    expert_fields.ignore_next_tokens(fields)
    width = fields.size("moe_intermediate_size")
    num_shared = fields.integer("moe_num_shared_experts", default=2)
    activation = family.activation(fields)
    experts = Experts(
        router=expert_fields.router(fields, corrects=True),
        intermediate_size=width,
        activation=activation,
        shared_size=width * num_shared if num_shared else None,
        names="ernie",
    )
    dense = MLP(
        intermediate_size=fields.size("intermediate_size"), activation=activation, bias=bias
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields, 1e-5)))
    layers = [
        family.layer(attention, experts if is_sparse else dense, norms)
        for is_sparse in _sparse(fields)
    ]
    return family.model(fields, layers, norms, tied=True)


def _sparse(fields: ConfigFields) -> list[bool]:
    """Every so many layers, from one to another."""
    number = family.num_layers(fields)
    first = fields.integer("moe_layer_start_index", default=1)
    last = fields.integer("moe_layer_end_index", default=-1)
    step = fields.size("moe_layer_interval", default=1)
    last = number - 1 if last == -1 else last
    return [first <= layer <= last and (layer + 1) % step == 0 for layer in range(number)]


ERNIE4_5_MOE = family.Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    read=read,
    names_own_code=True,
    models="ERNIE 4.5 21B-A3B and 300B-A47B (text)",
)
