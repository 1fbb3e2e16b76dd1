"""OLMo 2: norms of what attention and MLP return, and of all queries and all keys together; OLMo 3,
of whose layers three of four slide; OLMoE, with routed experts and norms before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope, read_rope_by_kind
from octavo.models.rope import Rope

OLMO3_THETA = 500_000.0
GLOBAL_EVERY = 4


def read_olmoe(fields: ConfigFields) -> ModelConfig:
    """An OLMoE of a config.json's fields."""
    norm = RMSNorm(eps=family.epsilon(fields, 1e-5))
    bias = fields.boolean("attention_bias", default=False)
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=norm,
        qk_norm_whole=True,
    )
    normalizes = fields.boolean("norm_topk_prob", default=False)
    experts = Experts(
        router=expert_fields.router(fields, normalizes=normalizes),
        intermediate_size=fields.size("intermediate_size"),
        activation=family.activation(fields),
    )
    norms = Norms(norm=norm)
    layers = [family.layer(attention, experts, norms)] * family.num_layers(fields)
    return family.model(fields, layers, norms)


def read_olmo2(fields: ConfigFields) -> ModelConfig:
    """An OLMo 2 of a config.json's fields."""
    return _read(fields, (read_rope(fields),) * 2, [False] * family.num_layers(fields))


def read_olmo3(fields: ConfigFields) -> ModelConfig:
    """An OLMo 3 of a config.json's fields: its longer context is one of global layers."""
    ropes = read_rope_by_kind(fields, OLMO3_THETA, default_local_theta=None)
    return _read(
        fields, ropes, family.slides(fields, lambda layer: (layer + 1) % GLOBAL_EVERY != 0)
    )


def _read(fields: ConfigFields, ropes: tuple[Rope, Rope], slides: list[bool]) -> ModelConfig:
    """What the two share. `ropes` are those of global and of sliding layers."""
    bias = fields.boolean("attention_bias", default=False)
    norm = RMSNorm(eps=family.epsilon(fields, 1e-5))
    norms = Norms(norm=norm, before=False, after=True)
    window = fields.size("sliding_window", default=4096) if any(slides) else None
    by_kind = {
        slide: Attention(
            **family.heads(fields),
            rope=ropes[slide],
            sliding_window=window if slide else None,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
            qk_norm_whole=True,
        )
        for slide in (False, True)
    }
    mlp = family.gated_mlp(fields)
    layers = [family.layer(by_kind[slide], mlp, norms) for slide in slides]
    return family.model(fields, layers, norms)


def _from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Files of both say that they are OLMo 2; those without a window are."""
    number = fields["num_hidden_layers"]
    window = metadata.get("attention.sliding_window", int) or None
    if window is None:
        return {"layer_types": ["full_attention"] * number}
    types = metadata.layer_types(number, GLOBAL_EVERY)
    if "layer_types" not in types:
        every = types["sliding_window_pattern"]
        slides = [(layer + 1) % every != 0 for layer in range(number)]
        types = {"layer_types": ["sliding_attention" if s else "full_attention" for s in slides]}
    return {"sliding_window": window, **types}


OLMO2 = family.Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    read=read_olmo2,
    models="OLMo 2",
    gguf="olmo2",
)
OLMO3 = family.Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    read=read_olmo3,
    models="OLMo 3",
    gguf="olmo2",
    gguf_keys=frozenset({"attention.sliding_window", "attention.sliding_window_pattern"}),
    gguf_fields=_from_gguf,
)
OLMOE = family.Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    read=read_olmoe,
    models="OLMoE 1B-7B",
)
