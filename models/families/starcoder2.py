"""StarCoder 2: norms that subtract the mean, an MLP without a gate, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import LayerNorm, Norms
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope
from octavo.models.stored_names import StoredNames

PUBLISHED_WINDOW = 4096
_IMPLEMENTED = {
    "attention_softmax_in_fp32": True,
    "mlp_type": "default",
    "norm_type": "layer_norm",
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
}
"""Fields of published files that have one value."""
_STORED = StoredNames(renamed=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")))


def read(fields: ConfigFields) -> ModelConfig:
    """A StarCoder 2 of a config.json's fields."""
    bias = fields.boolean("use_bias", default=True)
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields),
        sliding_window=fields.size("sliding_window", default=None),
        qkv_bias=bias,
        out_bias=bias,
    )
    for name, implemented in _IMPLEMENTED.items():
        fields.only(name, implemented)
    for name in ("activation_function", "layer_norm_epsilon"):
        fields.ignore(name)  # `hidden_act` and `norm_epsilon` are in force
    mlp = MLP(
        intermediate_size=fields.size("intermediate_size"),
        activation=family.activation(fields, "gelu_tanh"),
        bias=bias,
        gated=False,
    )
    epsilon = fields.number("layer_norm_eps", default=1e-5)  # of a GGUF file
    epsilon = fields.number("norm_epsilon", default=epsilon)
    norms = Norms(norm=LayerNorm(eps=epsilon, bias=True))
    layer = family.layer(attention, mlp, norms, _STORED)
    return family.model(fields, [layer] * family.num_layers(fields), norms, tied=True)


def _from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Files leave the window out, which all of its models have."""
    del fields
    return {"sliding_window": metadata.size("attention.sliding_window", PUBLISHED_WINDOW)}


STARCODER2 = family.Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    read=read,
    models="StarCoder 2",
    gguf="starcoder2",
    gguf_keys=frozenset({"attention.sliding_window"}),
    gguf_fields=_from_gguf,
)
