"""Qwen 2 and Qwen 3 with routed experts in every layer, or in some of them.

Qwen 2 has a shared expert with a gate of its own beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import UnsupportedModelError
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope


def read_qwen2_moe(fields: ConfigFields) -> ModelConfig:
    """A Qwen 2 with experts, of a config.json's fields."""
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields),
        qkv_bias=fields.boolean("qkv_bias", default=True),
    )
    shared_size = fields.size("shared_expert_intermediate_size")
    return _read(fields, attention, shared_size=shared_size, shared_gate=True)


def read_qwen3_moe(fields: ConfigFields) -> ModelConfig:
    """A Qwen 3 with experts, of a config.json's fields."""
    bias = fields.boolean("attention_bias", default=False)
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=RMSNorm(eps=family.epsilon(fields)),
    )
    return _read(fields, attention)


def _read(fields: ConfigFields, attention: Attention, **shared: Any) -> ModelConfig:
    _refuse_windows(fields)
    activation = family.activation(fields)
    dense = MLP(intermediate_size=fields.size("intermediate_size"), activation=activation)
    experts = Experts(
        router=expert_fields.router(
            fields, normalizes=fields.boolean("norm_topk_prob", default=False)
        ),
        intermediate_size=fields.size("moe_intermediate_size"),
        activation=activation,
        **shared,
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields)))
    layers = [
        family.layer(attention, experts if is_sparse else dense, norms)
        for is_sparse in expert_fields.sparse_layers(fields)
    ]
    return family.model(fields, layers, norms)


def _refuse_windows(fields: ConfigFields) -> None:
    """No released model has windows, and versions of transformers disagree on what they would be.

    Raises:
        UnsupportedModelError: the file asks for them.
    """
    uses = fields.boolean("use_sliding_window", default=False)
    if uses or any(family.slides(fields, lambda layer: False)):
        raise UnsupportedModelError(
            f"{fields.where}: use_sliding_window is not supported with experts: false"
        )
    for name in ("sliding_window", "max_window_layers"):
        fields.ignore(name)


def _from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Such files have experts in all layers; that shares are normalized is taken for granted."""
    width = metadata.size("expert_feed_forward_length", fields["intermediate_size"])
    return {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
    }


QWEN2_MOE = family.Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    read=read_qwen2_moe,
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
)
QWEN3_MOE = family.Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    read=read_qwen3_moe,
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    gguf="qwen3moe",
    gguf_keys=frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length"}),
    gguf_fields=_from_gguf,
)
