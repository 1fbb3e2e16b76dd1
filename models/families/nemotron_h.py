"""Nemotron-H: a layer is one of Mamba-2, attention without a rotary embedding, an MLP, or experts;
MLPs and experts have no gates, and square what is above zero."""

from __future__ import annotations

from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.mamba2 import Mamba2
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.checks import MAX_LAYERS
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.stored_names import StoredNames

_KINDS = {
    "M": "mamba",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "attention": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "mlp": "mlp",
    "E": "moe",
    "moe": "moe",
}
"""What files call a layer -> what it is."""
_STORED = StoredNames(
    renamed=(
        ("input_layernorm", "norm"),
        ("post_attention_layernorm", "norm"),
        *((f"self_attn.{name}_proj", f"mixer.{name}_proj") for name in "qkvo"),
        *((f"mlp.{name}_proj", f"mixer.{name}_proj") for name in ("up", "down")),
    )
)
_ONLY = {
    "attention_bias": False,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "residual_in_fp32": False,
    "use_bias": False,
}
"""Fields -> the value that is implemented."""
_IGNORED = (
    *("chunk_size", "expand", "mamba_ssm_cache_dtype", "num_logits_to_keep", "use_mamba_kernels"),
    *("time_step_limit", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
    *("moe_shared_expert_overlap", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),
    *("rope_theta", "partial_rotary_factor", "rms_norm_eps"),  # nothing is rotated
)
"""Fields of how it is computed, of training, or that transformers leaves unread."""
_OF_PARTS = (
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("attention_head_dim", "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"),
    *("conv_kernel", "use_conv_bias", "time_step_min"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "routed_scaling_factor", "norm_topk_prob"),
    *("n_group", "topk_group", *expert_fields.OF_TRAINING),
)
"""Fields of kinds of layers that may not be there."""


def read(fields: ConfigFields) -> ModelConfig:
    """A Nemotron-H of a config.json's fields."""
    for name, allowed in _ONLY.items():
        fields.only(name, allowed)
    for name in (*_IGNORED, *_OF_PARTS):
        fields.ignore(name)
    expert_fields.ignore_next_tokens(fields)
    kinds = _kinds(fields)
    norms = Norms(norm=RMSNorm(eps=fields.number("layer_norm_epsilon", default=1e-5)))
    made = {kind: _part(fields, kind) for kind in dict.fromkeys(kinds)}
    layers = [
        LayerSpec(
            mixer=made[kind] if kind in ("mamba", "attention") else None,
            feed_forward=made[kind] if kind in ("mlp", "moe") else None,
            norms=norms,
            stored=_STORED,
        )
        for kind in kinds
    ]
    return family.model(fields, layers, norms, final_norm_stored="model.norm_f")


def _kinds(fields: ConfigFields) -> list[str]:
    """What each layer is, as a list says, or a text of a letter a layer.

    Raises:
        UnsupportedModelError: another kind of layer.
        ModelLoadError: neither is there, or as many layers as `num_hidden_layers` says are not.
    """
    named: Any = fields.raw("layers_block_type") or fields.raw("layer_types")
    pattern = fields.text("hybrid_override_pattern", default=None)
    named = named or list(pattern or "")
    if not isinstance(named, list) or not 1 <= len(named) <= MAX_LAYERS:
        raise ModelLoadError(
            f"{fields.where}: layers_block_type = {shorten(named)} is not allowed: a list of 1 to "
            f"{MAX_LAYERS} layers"
        )
    if any(not isinstance(each, str) or each not in _KINDS for each in named):
        raise UnsupportedModelError(
            f"{fields.where}: layers_block_type = {shorten(named)} is not supported: a list of "
            f"{', '.join(_KINDS)}"
        )
    number = fields.integer("num_hidden_layers", default=len(named))
    if number != len(named):
        raise ModelLoadError(
            f"{fields.where}: num_hidden_layers = {number} is not allowed: {len(named)}, by "
            f"layers_block_type"
        )
    return [_KINDS[each] for each in named]


def _part(fields: ConfigFields, kind: str) -> Any:
    """What a layer of a kind is made of."""
    if kind == "mamba":
        # transformers lets steps be no smaller than time_step_min in prompts, and forgets it in
        # decode steps. Here it holds in both, so that a prompt may be cut anywhere.
        num_heads = fields.size("mamba_num_heads", default=128)
        return Mamba2(
            num_heads=num_heads,
            num_groups=fields.size("n_groups", default=8),
            head_size=fields.size("mamba_head_dim", default=64),
            state_size=fields.size("ssm_state_size", default=128),
            width=fields.size("conv_kernel", default=4),
            eps=fields.number("layer_norm_epsilon", default=1e-5),
            conv_bias=fields.boolean("use_conv_bias", default=True),
            min_step=fields.number("time_step_min", default=0.001),
            stored="mixer",
        )
    if kind == "attention":
        head_dim = fields.size("attention_head_dim", default=128)
        return Attention(
            num_heads=fields.size("num_attention_heads"),
            num_kv_heads=fields.size("num_key_value_heads", default=8),
            head_dim=fields.size("head_dim", default=head_dim),
            rope=None,
        )
    if kind == "mlp":
        width = fields.size("intermediate_size")
        return MLP(intermediate_size=width, activation="relu2", gated=False)
    return _experts(fields)


def _experts(fields: ConfigFields) -> Experts:
    fields.only("moe_latent_size", None)
    fields.only("n_shared_experts", 1)
    return Experts(
        router=expert_fields.router(
            fields,
            scores="sigmoid",
            corrects=True,
            normalizes=fields.boolean("norm_topk_prob", default=True),
            num_groups=fields.size("n_group", default=1),
            num_chosen_groups=fields.size("topk_group", default=1),
            scale=fields.number("routed_scaling_factor", default=1.0),
        ),
        intermediate_size=fields.size("moe_intermediate_size"),
        activation="relu2",
        gated=False,
        shared_size=fields.size("moe_shared_expert_intermediate_size"),
        names="nemotron_h",
    )


NEMOTRON_H = family.Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    read=read,
    models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano 30B-A3B",
    names_own_code=True,
)
