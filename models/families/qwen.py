"""Qwen 2, with biases of queries, keys and values, and Qwen 3, with norms of queries and keys.

The text model of Qwen 3 VL is a Qwen 3: each of a token's three positions has some of the rotary
frequencies, and in a text the three are one number.
"""

from __future__ import annotations

import dataclasses

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.checks import check_size
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope
from octavo.models.rope import Rope


def read_qwen2(fields: ConfigFields) -> ModelConfig:
    """A Qwen 2 of a config.json's fields."""
    attention = Attention(**family.heads(fields), rope=read_rope(fields), qkv_bias=True)
    return _read(fields, attention)


def read_qwen3(fields: ConfigFields) -> ModelConfig:
    """A Qwen 3 of a config.json's fields."""
    return _read_qwen3(fields, read_rope(fields))


def read_qwen3_vl(fields: ConfigFields) -> ModelConfig:
    """The text model of a Qwen 3 VL."""
    rope = read_rope(fields, 5_000_000.0, ignored=("mrope_section", "mrope_interleaved"))
    return _read_qwen3(fields, rope)


def _read_qwen3(fields: ConfigFields, rope: Rope) -> ModelConfig:
    family.need_head_dim(fields)
    bias = fields.boolean("attention_bias", default=False)
    attention = Attention(
        **family.heads(fields),
        rope=rope,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=RMSNorm(eps=family.epsilon(fields)),
    )
    return _read(fields, attention)


def _read(fields: ConfigFields, attention: Attention) -> ModelConfig:
    """The layers, of which some slide where the file says so, and the rest."""
    uses_window = fields.boolean("use_sliding_window", default=False)
    window = fields.integer("sliding_window", default=None)
    first_sliding = fields.integer("max_window_layers", default=28)
    uses_window = uses_window and window is not None
    mlp = MLP(
        intermediate_size=fields.size("intermediate_size"), activation=family.activation(fields)
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields)))
    slides = family.slides(fields, lambda layer: uses_window and layer >= first_sliding)
    if any(slides):
        check_size("sliding_window", window if uses_window else None)
    sliding = dataclasses.replace(attention, sliding_window=window if uses_window else None)
    layers = [family.layer(sliding if slide else attention, mlp, norms) for slide in slides]
    return family.model(fields, layers, norms)


QWEN2 = family.Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    read=read_qwen2,
    models="Qwen 2 and 2.5",
    gguf="qwen2",
)
QWEN3 = family.Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    read=read_qwen3,
    models="Qwen 3, Qwen3-Embedding, Qwen3-Reranker",
    gguf="qwen3",
)
QWEN3_VL = family.Family(
    architecture="Qwen3VLTextModel",
    model_type="qwen3_vl_text",
    read=read_qwen3_vl,
    models="the text model of Qwen3-VL",
    defaults={"head_dim": 128},
)
