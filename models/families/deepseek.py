"""DeepSeek V2, V3 and R1, and Kimi K2: attention over latents, and routed experts with shared ones
beside them, in all layers but the first. Youtu-LLM: the same attention, with a plain MLP."""

from __future__ import annotations

from octavo.engine.errors import UnsupportedModelError, shorten
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.latent_attention import LatentAttention
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.blocks.router import Router
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family, latent_fields
from octavo.models.families.config_fields import ConfigFields

_OF_TRAINING = ("aux_loss_alpha", "ep_size", "seq_aux")
_METHODS = ("greedy", "group_limited_greedy")


def read_v2(fields: ConfigFields) -> ModelConfig:
    """A DeepSeek V2 of a config.json's fields."""
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False)  # which transformers does not do either
    method = fields.text("topk_method", default="greedy")
    if method not in _METHODS:
        raise UnsupportedModelError(
            f"{fields.where}: topk_method = {shorten(method)} is not supported: "
            f"{' or '.join(_METHODS)}"
        )
    groups = {"num_group_scores": 1} | groups_of(fields)
    if method == "greedy":
        groups = {}
    router = expert_fields.router(
        fields,
        normalizes=False,
        scale=fields.number("routed_scaling_factor", default=1.0),
        **groups,
    )
    attention = latent_fields.attention(fields, pairs=True)
    return read_with_experts(fields, attention, router, num_dense=0, num_shared=2)


def read_v3(fields: ConfigFields) -> ModelConfig:
    """A DeepSeek V3 or a Kimi K2 of a config.json's fields."""
    attention = latent_fields.attention(fields, pairs=interleaves(fields))
    return read_with_experts(fields, attention, corrected_router(fields), num_dense=3)


def read_youtu(fields: ConfigFields) -> ModelConfig:
    """A Youtu-LLM of a config.json's fields."""
    fields.ignore("embedding_initializer_range")
    attention = latent_fields.attention(fields, pairs=interleaves(fields))
    mlp, norms = family.gated_mlp(fields), Norms(norm=RMSNorm(eps=family.epsilon(fields)))
    layers = [family.layer(attention, mlp, norms)] * family.num_layers(fields)
    return family.model(fields, layers, norms, tied=True)


def interleaves(fields: ConfigFields) -> bool:
    """Whether numbers that are rotated together lie side by side on disk."""
    return fields.boolean("rope_interleave", default=True)


def groups_of(fields: ConfigFields) -> dict[str, int]:
    """Groups of experts, as `Router` takes them."""
    return {
        "num_groups": fields.size("n_group", default=1),
        "num_chosen_groups": fields.size("topk_group", default=1),
    }


def corrected_router(fields: ConfigFields) -> Router:
    """A router by corrected sigmoids, from groups of experts."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    return expert_fields.router(
        fields,
        scores="sigmoid",
        normalizes=fields.boolean("norm_topk_prob", default=True),
        corrects=True,
        scale=fields.number("routed_scaling_factor", default=1.0),
        **groups_of(fields),
    )


def read_with_experts(
    fields: ConfigFields,
    attention: LatentAttention,
    router: Router,
    *,
    num_dense: int,
    num_shared: int = 1,
    eps: float = 1e-6,
) -> ModelConfig:
    """The model of these parts.

    Args:
        num_dense: layers without experts, of a file that says neither how many nor which.
        num_shared: experts that all tokens go to, of a file that says none.
        eps: of the norms, of a file that says none.
    """
    fields.only("moe_layer_freq", 1)
    for name in _OF_TRAINING:
        fields.ignore(name)
    width = fields.size("moe_intermediate_size")
    experts = Experts(
        router=router,
        intermediate_size=width,
        activation=family.activation(fields),
        shared_size=width * fields.size("n_shared_experts", default=num_shared),
        names="glm",
    )
    has_experts = expert_fields.after_dense_layers(fields, num_dense)
    expert_fields.ignore_next_tokens(fields)
    dense = family.gated_mlp(fields)
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields, eps)))
    layers = [
        family.layer(attention, experts if sparse else dense, norms) for sparse in has_experts
    ]
    return family.model(fields, layers, norms)


DEEPSEEK_V2 = family.Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    read=read_v2,
    models="DeepSeek V2, V2-Lite and Coder V2",
    names_own_code=True,
)
DEEPSEEK_V3 = family.Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    also=("kimi_k2",),
    read=read_v3,
    models="DeepSeek V3, V3.1 and R1, Kimi K2, Moonlight",
    names_own_code=True,
)
YOUTU = family.Family(
    architecture="YoutuForCausalLM",
    model_type="youtu",
    read=read_youtu,
    models="Youtu-LLM 2B",
    names_own_code=True,
)
