"""Qwen3-Next and Qwen 3.5 (and 3.6): gated delta nets in most layers, gated attention in some, and
routed experts in most models.

Both have the same layers. Qwen3-Next keeps the rows of a delta net's linear layers by key head, and
Qwen 3.5 by what they are for. Layers that guess tokens beyond the next one are not read.
"""

from __future__ import annotations

from octavo.engine.errors import UnsupportedModelError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.gated_delta import GatedDelta
from octavo.models.blocks.layer import FeedForward, LayerSpec
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope
from octavo.models.rope import Rope

_TYPES = ("linear_attention", "full_attention")
_NEXT_TOKENS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
_ROTATED = 0.25
"""Share of a head that is rotated where the file does not say."""


def read_qwen3_next(fields: ConfigFields) -> ModelConfig:
    """A Qwen3-Next of a config.json's fields."""
    dense = _mlp(fields)
    experts = _experts(fields, normalizes=fields.boolean("norm_topk_prob", default=True))
    feed_forwards: list[FeedForward] = [
        experts if is_sparse else dense for is_sparse in expert_fields.sparse_layers(fields)
    ]
    rope = read_rope(fields, fraction=_ROTATED)
    return _model(fields, rope, feed_forwards, by_key_head=True)


def read_qwen3_5(fields: ConfigFields) -> ModelConfig:
    """A dense Qwen 3.5 of a config.json's fields."""
    feed_forwards: list[FeedForward] = [_mlp(fields)] * family.num_layers(fields)
    return _qwen3_5(fields, feed_forwards)


def read_qwen3_5_moe(fields: ConfigFields) -> ModelConfig:
    """A Qwen 3.5 with experts in all layers, of a config.json's fields."""
    fields.only("mlp_only_layers", [])
    feed_forwards: list[FeedForward] = [_experts(fields)] * family.num_layers(fields)
    return _qwen3_5(fields, feed_forwards)


def _qwen3_5(fields: ConfigFields, feed_forwards: list[FeedForward]) -> ModelConfig:
    fields.only("attn_output_gate", True)
    fields.only("mamba_ssm_dtype", "float32")
    for name in _NEXT_TOKENS:
        fields.ignore(name)
    ignored = ("mrope_section", "mrope_interleaved")  # in a text its three positions are one
    rope = read_rope(fields, fraction=_ROTATED, ignored=ignored)
    return _model(fields, rope, feed_forwards, by_key_head=False)


def _mlp(fields: ConfigFields) -> MLP:
    return MLP(
        intermediate_size=fields.size("intermediate_size"), activation=family.activation(fields)
    )


def _experts(fields: ConfigFields, normalizes: bool = True) -> Experts:
    return Experts(
        router=expert_fields.router(fields, normalizes=normalizes),
        intermediate_size=fields.size("moe_intermediate_size"),
        activation=family.activation(fields),
        shared_size=fields.size("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _model(
    fields: ConfigFields, rope: Rope, feed_forwards: list[FeedForward], *, by_key_head: bool
) -> ModelConfig:
    family.need_head_dim(fields)
    norm = RMSNorm(eps=family.epsilon(fields), offset=1.0)
    norms, bias = Norms(norm=norm), fields.boolean("attention_bias", default=False)
    attention = Attention(
        **family.heads(fields),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        output_gate=True,
    )
    if family.activation(fields) != "silu":
        raise UnsupportedModelError(
            f"{fields.where}: hidden_act = {shorten(fields.raw('hidden_act'))} is not supported: "
            "silu, with gated delta nets"
        )
    delta = GatedDelta(
        num_key_heads=fields.size("linear_num_key_heads", default=16),
        num_value_heads=fields.size("linear_num_value_heads", default=32),
        key_size=fields.size("linear_key_head_dim", default=128),
        value_size=fields.size("linear_value_head_dim", default=128),
        width=fields.size("linear_conv_kernel_dim", default=4),
        eps=family.epsilon(fields),
        by_key_head=by_key_head,
    )
    layers = [
        LayerSpec(mixer=delta if is_linear else attention, feed_forward=each, norms=norms)
        for is_linear, each in zip(_linear(fields), feed_forwards, strict=True)
    ]
    return family.model(fields, layers, norms)


def _linear(fields: ConfigFields) -> list[bool]:
    """Which layers have a delta net; the others attend."""
    types = family.layer_types(fields, _TYPES)
    interval = fields.size("full_attention_interval", default=4)
    if types is None:
        return [(layer + 1) % interval != 0 for layer in range(family.num_layers(fields))]
    return [each == "linear_attention" for each in types]


QWEN3_NEXT = family.Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    read=read_qwen3_next,
    models="Qwen3-Next-80B-A3B",
)
QWEN3_5 = family.Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    read=read_qwen3_5,
    models="Qwen 3.5 and 3.6, dense",
    defaults={"head_dim": 256},
)
QWEN3_5_MOE = family.Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    read=read_qwen3_5_moe,
    models="Qwen 3.5 and 3.6 with experts",
    defaults={"head_dim": 256},
)
