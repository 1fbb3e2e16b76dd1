"""Command R: attention and MLP beside each other, norms that subtract the mean, rotation in pairs;
Command R7B and A, of whose layers three of four slide, and the others rotate nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.norms import LayerNorm, Norms
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope

GLOBAL_EVERY = 4
_IMPLEMENTED = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}
"""Fields of published files that have one value."""


def read_cohere(fields: ConfigFields) -> ModelConfig:
    """A Command R of a config.json's fields."""
    whole = _attention(fields, 500_000.0)
    return _read(fields, [whole] * family.num_layers(fields))


def read_cohere2(fields: ConfigFields) -> ModelConfig:
    """A Command R7B or Command A of a config.json's fields."""
    rotated = _attention(fields, 10_000.0)
    window = fields.size("sliding_window", default=4096)
    every = fields.size("layer_switch", default=GLOBAL_EVERY)
    every = fields.size("sliding_window_pattern", default=every)
    every = fields.size("_sliding_window_pattern", default=every)
    slides = family.slides(fields, lambda layer: (layer + 1) % every != 0)
    sliding = dataclasses.replace(rotated, sliding_window=window)
    whole = dataclasses.replace(rotated, rope=None)
    return _read(fields, [sliding if slide else whole for slide in slides])


def _attention(fields: ConfigFields, default_theta: float) -> Attention:
    bias = fields.boolean("attention_bias", default=False)
    return Attention(
        **family.heads(fields),
        rope=read_rope(fields, default_theta, pairs=True),
        qkv_bias=bias,
        out_bias=bias,
    )


def _read(fields: ConfigFields, attention: list[Attention]) -> ModelConfig:
    for name, implemented in _IMPLEMENTED.items():
        fields.only(name, implemented)
    fields.ignore("use_parallel_embedding")  # how weights were split in training
    norm = LayerNorm(eps=fields.number("layer_norm_eps", default=1e-5))
    norms = Norms(norm=norm, parallel=True)
    mlp = family.gated_mlp(fields)
    model = family.model(
        fields,
        [family.layer(each, mlp, norms) for each in attention],
        norms,
        tied=True,
        logit_scale=fields.number("logit_scale", default=0.0625),
    )
    # Command R's `max_position_embeddings` is smaller than the context that it was trained on.
    longest = fields.size("model_max_length", default=model.max_position_embeddings)
    return dataclasses.replace(model, max_position_embeddings=longest)


def _cohere_from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    del fields
    return {"logit_scale": metadata.decimal("logit_scale")}


def _cohere2_from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "logit_scale": metadata.decimal("logit_scale"),
        "sliding_window": metadata.size("attention.sliding_window"),
        **metadata.layer_types(fields["num_hidden_layers"], GLOBAL_EVERY),
    }


COHERE = family.Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    read=read_cohere,
    models="Command R",
    gguf="command-r",
    gguf_keys=frozenset({"logit_scale"}),
    gguf_fields=_cohere_from_gguf,
)
COHERE2 = family.Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    read=read_cohere2,
    models="Command R7B, Command A",
    gguf="cohere2",
    gguf_keys=frozenset(
        {"logit_scale", "attention.sliding_window", "attention.sliding_window_pattern"}
    ),
    gguf_fields=_cohere2_from_gguf,
)
