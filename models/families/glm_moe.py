"""GLM-4.5 to 4.7: routed experts, chosen by corrected sigmoids from groups of them, with a shared
one beside them, in all layers but the first. GLM-4.7-Flash: the same over DeepSeek's attention."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import deepseek, expert_fields, family, latent_fields
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope


def read(fields: ConfigFields) -> ModelConfig:
    """A GLM-4.5 of a config.json's fields."""
    norm = RMSNorm(eps=family.epsilon(fields, 1e-5))
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields, fraction=0.5),
        qkv_bias=fields.boolean("attention_bias", default=False),
        qk_norm=norm if fields.boolean("use_qk_norm", default=False) else None,
    )
    router = expert_fields.router(
        fields,
        scores="sigmoid",
        normalizes=fields.boolean("norm_topk_prob", default=True),
        corrects=True,
        num_groups=fields.size("n_group", default=1),
        num_chosen_groups=fields.size("topk_group", default=1),
        scale=fields.number("routed_scaling_factor", default=1.0),
    )
    width = fields.size("moe_intermediate_size")
    experts = Experts(
        router=router,
        intermediate_size=width,
        activation=family.activation(fields),
        shared_size=width * fields.size("n_shared_experts", default=1),
        names="glm",
    )
    num_dense = expert_fields.num_dense_layers(fields)
    expert_fields.ignore_next_tokens(fields)
    dense, norms = family.gated_mlp(fields), Norms(norm=norm)
    layers = [
        family.layer(attention, dense if layer < num_dense else experts, norms)
        for layer in range(family.num_layers(fields))
    ]
    return family.model(fields, layers, norms)


def read_lite(fields: ConfigFields) -> ModelConfig:
    """A GLM-4.7-Flash of a config.json's fields."""
    attention = latent_fields.attention(fields, pairs=deepseek.interleaves(fields))
    router = deepseek.corrected_router(fields)
    return deepseek.read_with_experts(fields, attention, router, num_dense=1, eps=1e-5)


GLM4_MOE = family.Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    read=read,
    models="GLM-4.5, GLM-4.5-Air, GLM-4.6 and 4.7",
)
GLM4_MOE_LITE = family.Family(
    architecture="Glm4MoeLiteForCausalLM",
    model_type="glm4_moe_lite",
    read=read_lite,
    models="GLM-4.7-Flash",
)
