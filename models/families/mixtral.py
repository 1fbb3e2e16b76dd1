"""Mixtral: Mistral with routed experts in place of every MLP; and MiniMax M2, whose router takes
corrected sigmoids, and which has norms of all queries and all keys together."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.blocks.router import Router
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope

_THETA = 1_000_000.0
_MINIMAX_THETA = 5_000_000.0


def read_mixtral(fields: ConfigFields) -> ModelConfig:
    """A Mixtral of a config.json's fields."""
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields, _THETA),
        sliding_window=fields.size("sliding_window", default=None),
    )
    return _read(fields, attention, expert_fields.router(fields))


def read_minimax_m2(fields: ConfigFields) -> ModelConfig:
    """A MiniMax M2 of a config.json's fields."""
    family.need_head_dim(fields)
    expert_fields.ignore_next_tokens(fields)
    fields.only("use_qk_norm", True)
    fields.only("qk_norm_type", "per_layer")
    fields.only("use_routing_bias", True)
    fields.only("scoring_func", "sigmoid")
    fields.only("shared_intermediate_size", 0)
    fields.only("attn_type_list", [1] * family.num_layers(fields))
    heads = family.heads(fields)
    rotated = fields.size("rotary_dim", default=None)
    fraction = 1.0 if rotated is None else rotated / heads["head_dim"]
    attention = Attention(
        **heads,
        rope=read_rope(fields, _MINIMAX_THETA, fraction=fraction),
        qk_norm=RMSNorm(eps=family.epsilon(fields)),
        qk_norm_whole=True,
    )
    router = expert_fields.router(fields, scores="sigmoid", corrects=True)
    return _read(fields, attention, router)


def _read(fields: ConfigFields, attention: Attention, router: Router) -> ModelConfig:
    experts = Experts(
        router=router,
        intermediate_size=fields.size("intermediate_size"),
        activation=family.activation(fields),
        names="mixtral",
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields)))
    layers = [family.layer(attention, experts, norms)] * family.num_layers(fields)
    return family.model(fields, layers, norms)


MIXTRAL = family.Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    read=read_mixtral,
    models="Mixtral 8x7B and 8x22B",
)
MINIMAX_M2 = family.Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    read=read_minimax_m2,
    models="MiniMax M2, M2.1 and M2.5, in bfloat16",
    names_own_code=True,
)
