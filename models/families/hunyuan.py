"""Hunyuan, dense and with experts: queries and keys are normalized after they are rotated, and a
fixed factor stretches the base of the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.layer import FeedForward
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import DEFAULT_THETA, read_rope
from octavo.models.rope import Rope
from octavo.models.stored_names import StoredNames

_STORED = StoredNames(
    renamed=(
        ("self_attn.q_norm", "self_attn.query_layernorm"),
        ("self_attn.k_norm", "self_attn.key_layernorm"),
    )
)
_ONLY = {
    "attention_head_dim": None,
    "moe_drop_tokens": False,
    "moe_layer_num_skipped": 0,
    "norm_topk_prob": True,
    "norm_type": "rms",
    "routed_scaling_factor": 1.0,
    "use_cla": False,
    "use_mixed_mlp_moe": True,
    "use_mla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}
"""Fields of the releases' own code -> the value that transformers takes for granted; None is that
of head_dim."""
_IGNORED = (
    *("add_classification_head", "class_num", "cla_share_factor", "eod_token_id", "im_end_id"),
    *("im_newline_id", "im_start_id", "image_token_id", "mask_init_id", "org_vocab_size"),
    *("pad_id", "pool_type", "skip_cls_token", "text_end_id", "text_start_id"),
    *("moe_random_routing_dropped_token", "capacity_factor", "kv_lora_rank", "q_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
"""Fields of what is switched off, or of training, or tokens' numbers."""


def read_dense(fields: ConfigFields) -> ModelConfig:
    """A dense Hunyuan of a config.json's fields."""
    return _read(fields, [family.gated_mlp(fields)] * family.num_layers(fields))


def read_moe(fields: ConfigFields) -> ModelConfig:
    """A Hunyuan with experts, and a shared one of their width, of a config.json's fields."""
    number, width = family.num_layers(fields), fields.size("intermediate_size")
    for name, allowed in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        if set(_by_layer(fields, name, allowed)) != {allowed}:
            raise UnsupportedModelError(
                f"{fields.where}: {name} = {shorten(fields.raw(name))} is not supported: {allowed}"
            )
    fields.only("mlp_bias", False)
    activation = family.activation(fields)
    for name in expert_fields.OF_TRAINING:
        fields.ignore(name)
    chosen = _by_layer(fields, "moe_topk", 1)
    experts = [
        Experts(
            router=expert_fields.router(
                ConfigFields({"num_experts": fields.size("num_experts"), "moe_k": each})
            ),
            intermediate_size=width,
            activation=activation,
            shared_size=width,
            names="hunyuan",
        )
        for each in chosen
    ]
    assert len(experts) == number
    return _read(fields, experts)


def _read(fields: ConfigFields, feed_forwards: Sequence[FeedForward]) -> ModelConfig:
    bias = fields.boolean("attention_bias", default=False)
    heads, norm = family.heads(fields), RMSNorm(eps=family.epsilon(fields, 1e-5))
    for name, allowed in _ONLY.items():
        fields.only(name, heads["head_dim"] if allowed is None else allowed)
    for name in _IGNORED:
        fields.ignore(name)
    attention = Attention(
        **heads,
        rope=_rope(fields, heads["head_dim"]),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        qk_norm_last=True,
    )
    norms = Norms(norm=norm)
    layers = [family.layer(attention, each, norms, _STORED) for each in feed_forwards]
    return family.model(fields, layers, norms)


def _rope(fields: ConfigFields, head_dim: int) -> Rope:
    """A kind that calls itself dynamic has a fixed factor, alpha, of the base alone: what else it
    names does nothing. Source: NTK-aware scaling, as transformers' Hunyuan has it."""
    said: Any = fields.raw("rope_parameters") or fields.raw("rope_scaling")
    if not isinstance(said, Mapping) or not said.get("alpha"):
        return read_rope(fields)
    values = ConfigFields(said, where=f"{fields.where}: rope scaling")
    kind = values.text("rope_type", default=None) or values.text("type", default=None)
    if kind != "dynamic":
        raise UnsupportedModelError(
            f"{fields.where}: rope_type = {shorten(kind)} is not supported with alpha: dynamic"
        )
    theta = fields.number("rope_theta", default=DEFAULT_THETA)
    theta, alpha = values.number("rope_theta", default=theta), values.number("alpha")
    if alpha <= 0:
        raise ModelLoadError(f"{values.where}: alpha = {alpha} is not allowed: above 0")
    for name in ("type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        values.ignore(name)
    values.refuse_unread()
    fields.ignore("rope_scaling")
    return Rope(theta=theta * alpha ** (head_dim / (head_dim - 2)))


def _by_layer(fields: ConfigFields, name: str, default: int) -> list[int]:
    """A size of each layer, which a file may say once.

    Raises:
        ModelLoadError: a list of another length than there are layers, or of something else.
    """
    number, said = family.num_layers(fields), fields.raw(name)
    if not isinstance(said, list):
        return [fields.size(name, default=default)] * number
    if len(said) < number:
        raise ModelLoadError(
            f"{fields.where}: {name} = {shorten(said)} is not allowed: one for each of "
            f"num_hidden_layers ({number})"
        )
    return [ConfigFields({name: each}, where=fields.where).size(name) for each in said[:number]]


HUNYUAN_DENSE = family.Family(
    architecture="HunYuanDenseV1ForCausalLM",
    model_type="hunyuan_v1_dense",
    read=read_dense,
    models="Hunyuan 0.5B, 1.8B, 4B and 7B",
    names_own_code=True,
)
HUNYUAN_MOE = family.Family(
    architecture="HunYuanMoEV1ForCausalLM",
    model_type="hunyuan_v1_moe",
    read=read_moe,
    models="Hunyuan-A13B",
    names_own_code=True,
)
