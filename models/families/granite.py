"""Granite 3: Llama whose embeddings, attention, residual sums and logits are multiplied, dense or
with experts; Granite 4, whose layers are Mamba-2 or attention, with a shared MLP, and experts
beside it in large ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.layer import FeedForward, LayerSpec
from octavo.models.blocks.mamba2 import Mamba2
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family, mamba_fields
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope
from octavo.models.rope import Rope
from octavo.models.stored_names import COMMON, Fused, StoredNames

_OF_EXPERTS = ("intermediate_size", "num_experts_per_tok", *expert_fields.OF_TRAINING)
"""Fields of experts, which may not be there."""
_MAMBA, _ATTENTION = ("mamba", "linear_attention"), ("attention", "full_attention")
"""What layers are called, in older files and by newer versions of transformers."""
_SHARED_MLP = StoredNames(
    renamed=(("mlp.down_proj", "shared_mlp.output_linear"),),
    fused=(Fused("shared_mlp.input_linear", "ffn_up", ("mlp.gate_proj", "mlp.up_proj")),),
)


def read(fields: ConfigFields) -> ModelConfig:
    """A Granite 3 of a config.json's fields."""
    return _read(fields, read_rope(fields), family.gated_mlp(fields), COMMON)


def read_moe(fields: ConfigFields) -> ModelConfig:
    """A Granite 3 with experts, of a config.json's fields."""
    return _read(fields, read_rope(fields), _experts(fields), COMMON)


def read_hybrid(fields: ConfigFields) -> ModelConfig:
    """A Granite 4 of a config.json's fields."""
    types = family.layer_types(fields, _MAMBA + _ATTENTION)
    if types is None:
        raise ModelLoadError(f"{fields.where} lacks layer_types")
    fields.only("normalization_function", "rmsnorm")
    mamba_fields.ignore(fields)  # of layers that may not be there
    rope = read_rope(fields)
    rotates = fields.text("position_embedding_type", default=None) == "rope"
    shared_size = fields.size("shared_intermediate_size", default=1024)
    feed_forward: FeedForward
    if fields.integer("num_local_experts", default=8) == 0:
        feed_forward = MLP(intermediate_size=shared_size, activation=family.activation(fields))
        for name in _OF_EXPERTS:
            fields.ignore(name)
    else:
        feed_forward = _experts(fields, shared_size)
    recurs = [each in _MAMBA for each in types]
    mamba = mamba_fields.mamba(fields, family.epsilon(fields)) if any(recurs) else None
    mixers = [mamba if each else None for each in recurs]
    return _read(fields, rope if rotates else None, feed_forward, _SHARED_MLP, mixers)


def _experts(fields: ConfigFields, shared_size: int | None = None) -> Experts:
    """Of all layers; softmax over the chosen ones' logits is that over all, divided by its sum."""
    return Experts(
        router=expert_fields.router(fields),
        intermediate_size=fields.size("intermediate_size"),
        activation=family.activation(fields),
        shared_size=shared_size,
        names="granite",
    )


def _read(
    fields: ConfigFields,
    rope: Rope | None,
    feed_forward: FeedForward,
    stored: StoredNames,
    mixers: list[Mamba2 | None] | None = None,
) -> ModelConfig:
    """The model, of layers whose mixers are these, attention where there is none."""
    bias = fields.boolean("attention_bias", default=False)
    attention = Attention(
        **family.heads(fields),
        rope=rope,
        scale=family.multiplier(fields, "attention_multiplier"),
        qkv_bias=bias,
        out_bias=bias,
    )
    norms = Norms(
        norm=RMSNorm(eps=family.epsilon(fields)),
        residual_scale=family.multiplier(fields, "residual_multiplier"),
    )
    embedding = family.multiplier(fields, "embedding_multiplier")
    logits = family.multiplier(fields, "logits_scaling")
    mixers = mixers or [None] * family.num_layers(fields)
    return family.model(
        fields,
        [
            LayerSpec(
                mixer=each or attention, feed_forward=feed_forward, norms=norms, stored=stored
            )
            for each in mixers
        ],
        norms,
        embedding_scale=None if embedding == 1.0 else embedding,
        logit_scale=None if logits == 1.0 else 1.0 / logits,
    )


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
    models="Granite 4: 350M, 1B, Micro, and hybrids, Tiny and Small with experts too",
)
GRANITE_MOE = family.Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    read=read_moe,
    models="Granite 3 1B-A400M and 3B-A800M",
)
