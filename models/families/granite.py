"""Granite 3: Llama whose embeddings, attention, residual sums and logits are multiplied; Granite 4,
dense, in the words of its hybrids: a shared MLP without experts, and attention in all layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import UnsupportedModelError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.checks import check_positive
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope
from octavo.models.rope import Rope
from octavo.models.stored_names import COMMON, Fused, StoredNames

_OF_HYBRIDS = (
    "intermediate_size",
    "mamba_chunk_size",
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_proj_bias",
    "num_experts_per_tok",
    "output_router_logits",
    "router_aux_loss_coef",
    "time_step_limit",
)
"""Fields of layers that are not there."""
_SHARED_MLP = StoredNames(
    renamed=(("mlp.down_proj", "shared_mlp.output_linear"),),
    fused=(Fused("shared_mlp.input_linear", "ffn_up", ("mlp.gate_proj", "mlp.up_proj")),),
)


def read(fields: ConfigFields) -> ModelConfig:
    """A Granite 3 of a config.json's fields."""
    return _read(fields, read_rope(fields), family.gated_mlp(fields), COMMON)


def read_hybrid(fields: ConfigFields) -> ModelConfig:
    """A Granite 4 of a config.json's fields, if it has neither experts nor recurrent layers."""
    number, types = family.num_layers(fields), fields.raw("layer_types")
    if types not in (["attention"] * number, ["full_attention"] * number):
        raise UnsupportedModelError(
            f"{fields.where}: layer_types = {shorten(types)} is not supported: 'attention' for each"
        )
    num_experts = fields.integer("num_local_experts", default=8)
    if num_experts != 0:
        raise UnsupportedModelError(
            f"{fields.where}: num_local_experts = {num_experts} is not supported: 0"
        )
    fields.only("normalization_function", "rmsnorm")
    for name in _OF_HYBRIDS:
        fields.ignore(name)
    rope = read_rope(fields)
    rotates = fields.text("position_embedding_type", default=None) == "rope"
    mlp = MLP(
        intermediate_size=fields.size("shared_intermediate_size", default=1024),
        activation=family.activation(fields),
    )
    return _read(fields, rope if rotates else None, mlp, _SHARED_MLP)


def _read(fields: ConfigFields, rope: Rope | None, mlp: MLP, stored: StoredNames) -> ModelConfig:
    bias = fields.boolean("attention_bias", default=False)
    attention = Attention(
        **family.heads(fields),
        rope=rope,
        scale=_multiplier(fields, "attention_multiplier"),
        qkv_bias=bias,
        out_bias=bias,
    )
    norms = Norms(
        norm=RMSNorm(eps=family.epsilon(fields)),
        residual_scale=_multiplier(fields, "residual_multiplier"),
    )
    embedding = _multiplier(fields, "embedding_multiplier")
    logits = _multiplier(fields, "logits_scaling")
    layer = family.layer(attention, mlp, norms, stored)
    return family.model(
        fields,
        [layer] * family.num_layers(fields),
        norms,
        embedding_scale=None if embedding == 1.0 else embedding,
        logit_scale=None if logits == 1.0 else 1.0 / logits,
    )


def _multiplier(fields: ConfigFields, name: str) -> float:
    value: float = fields.number(name, default=1.0)
    check_positive(name, value)
    return value


def _from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": metadata.decimal(
            "attention.scale", 1.0 / math.sqrt(fields["head_dim"])
        ),
        "embedding_multiplier": metadata.decimal("embedding_scale"),
        "residual_multiplier": metadata.decimal("residual_scale"),
        "logits_scaling": metadata.decimal("logit_scale"),
    }


GRANITE = family.Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    read=read,
    models="Granite 3",
    gguf="granite",
    gguf_pairs=True,
    gguf_keys=frozenset({"attention.scale", "embedding_scale", "residual_scale", "logit_scale"}),
    gguf_fields=_from_gguf,
)
GRANITE_HYBRID = family.Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    read=read_hybrid,
    models="Granite 4 (dense: 350M, 1B, Micro)",
)
