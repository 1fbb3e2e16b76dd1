"""Gemma 4: layers without a window have wider heads, whose keys may be the values; the last layers
may read the caches of earlier ones; there may be inputs for each layer, and experts beside the MLP.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.layer import FeedForward, LayerSpec
from octavo.models.blocks.layer_inputs import LayerInputs, Tail
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope_by_kind
from octavo.models.rope import Rope

_GLOBAL_EVERY = 6
_ROPE = {
    "full_attention": {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip


def read(fields: ConfigFields) -> ModelConfig:
    """A Gemma 4 of a config.json's fields."""
    return _read(fields, _layer_inputs(fields), _experts(fields))


def read_unified(fields: ConfigFields) -> ModelConfig:
    """A Gemma 4 without inputs for each layer and without experts."""
    return _read(fields, None, None)


def _read(
    fields: ConfigFields, layer_inputs: LayerInputs | None, experts: dict[str, Any] | None
) -> ModelConfig:
    # A text's tokens see those before them, whatever those of an image do.
    fields.only("use_bidirectional_attention", "vision")
    slides = family.slides(fields, lambda layer: (layer + 1) % _GLOBAL_EVERY != 0)
    slides[-1] = False
    owners = _owners(fields, slides)
    norm = _norm(fields)
    norms = Norms(norm=norm, before=True, after=True)
    activation = family.activation(fields, "gelu_tanh")
    width, is_wide = fields.size("intermediate_size"), fields.boolean("use_double_wide_mlp", False)
    tail = Tail(
        norm=norm,
        input_size=None if layer_inputs is None else layer_inputs.size,
        activation=activation,
        scales=True,
    )

    def feed_forward(is_shared: bool) -> FeedForward:
        size = width * (2 if is_wide and is_shared else 1)
        if experts is None:
            return MLP(intermediate_size=size, activation=activation)
        return Experts(
            **experts, activation=activation, shared_size=size, apart=norm, names="gemma"
        )

    layers = [
        LayerSpec(
            mixer=attention,
            feed_forward=feed_forward(owner is not None),
            norms=norms,
            cache_of=owner,
            tail=tail,
        )
        for attention, owner in zip(_attentions(fields, slides, owners), owners, strict=True)
    ]
    return family.model(
        fields,
        layers,
        norms,
        tied=True,
        embedding_scale=math.sqrt(fields.size("hidden_size")),
        final_logit_softcap=fields.number("final_logit_softcapping", default=None),
        layer_inputs=layer_inputs,
    )


def _norm(fields: ConfigFields) -> RMSNorm:
    return RMSNorm(eps=family.epsilon(fields))


def _attentions(
    fields: ConfigFields, slides: list[bool], owners: list[int | None]
) -> list[Attention]:
    bias = fields.boolean("attention_bias", default=False)
    window = fields.size("sliding_window", default=512)
    keys_are_values = fields.boolean("attention_k_eq_v", default=False)
    ropes, norm = _ropes(fields), _norm(fields)
    return [
        Attention(
            num_heads=fields.size("num_attention_heads"),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=ropes[slide],
            sliding_window=window if slide else None,
            scale=1.0,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=norm,
            value_norm_eps=norm.eps,
            values_are_keys=keys_are_values and not slide,
            shares_cache=owner is not None,
        )
        for slide, owner, (num_kv_heads, head_dim) in zip(
            slides, owners, _heads(fields, slides, keys_are_values), strict=True
        )
    ]


def _ropes(fields: ConfigFields) -> tuple[Rope, Rope]:
    """Of global and of sliding layers."""
    if fields.raw("rope_parameters") is None:
        return read_rope_by_kind(ConfigFields({"rope_parameters": _ROPE}), 0.0)
    return read_rope_by_kind(fields, 1_000_000.0)


def _heads(
    fields: ConfigFields, slides: list[bool], keys_are_values: bool
) -> list[tuple[int, int]]:
    """KV heads and head size of each layer, as `per_layer_config` says, or the fields of all layers
    without a window.

    Raises:
        ModelLoadError: an entry of `per_layer_config` that is malformed.
        UnsupportedModelError: a layer that differs in something else.
    """
    common = (fields.size("num_key_value_heads", default=4), fields.size("head_dim", default=256))
    wide = fields.size("global_head_dim", default=512)
    few = fields.size("num_global_key_value_heads", default=None)
    others: Any = fields.raw("per_layer_config")
    if others is None:
        whole = (few if few is not None and keys_are_values else common[0], wide)
        return [common if slide else whole for slide in slides]
    where = f"{fields.where}: per_layer_config"
    if not isinstance(others, Mapping) or not all(
        isinstance(each, Mapping) for each in others.values()
    ):
        raise ModelLoadError(f"{where} = {shorten(others)} is not allowed: an object by layer")
    found = [common] * len(slides)
    for name, values in others.items():
        if not str(name).isdecimal() or int(name) >= len(slides):
            raise ModelLoadError(
                f"{where} of {shorten(name)} is not allowed: layers from 0 to {len(slides) - 1}"
            )
        layer = ConfigFields(values, where=f"{where} of layer {int(name)}")
        found[int(name)] = (
            layer.size("num_key_value_heads", default=common[0]),
            layer.size("head_dim", default=common[1]),
        )
        layer.refuse_unread()
    return found


def _owners(fields: ConfigFields, slides: list[bool]) -> list[int | None]:
    """Which layer's cache each reads: the last layers that of the last of their kind before them.

    Raises:
        ModelLoadError: as many layers as there are read others' caches, or more.
        UnsupportedModelError: there is no earlier layer of their kind.
    """
    number = fields.integer("num_kv_shared_layers", default=0)
    first = len(slides) - number
    if not 0 < first <= len(slides):
        raise ModelLoadError(
            f"{fields.where}: num_kv_shared_layers = {number} is not allowed: "
            f"0 to {len(slides) - 1}, by num_hidden_layers"
        )
    last = {slide: layer for layer, slide in enumerate(slides[:first])}
    if number and last.keys() != set(slides):
        raise UnsupportedModelError(
            f"{fields.where}: num_kv_shared_layers = {number} is not supported: fewer, so that the "
            f"first {first} layers are of all kinds in layer_types"
        )
    return [None if layer < first else last[slide] for layer, slide in enumerate(slides)]


def _layer_inputs(fields: ConfigFields) -> LayerInputs | None:
    """What makes each layer's input; None where there are none: a file says a size of 0."""
    vocab_size = fields.size("vocab_size_per_layer_input", default=262_144)
    if fields.integer("hidden_size_per_layer_input", default=256) == 0:
        return None
    size = fields.size("hidden_size_per_layer_input", default=256)
    return LayerInputs(vocab_size=vocab_size, size=size, norm=_norm(fields))


def _experts(fields: ConfigFields) -> dict[str, Any] | None:
    """The experts beside each MLP, as `Experts` takes them; None of a model without."""
    if not fields.boolean("enable_moe_block", default=False):
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            fields.ignore(name)
        return None
    return {
        "router": expert_fields.router(
            fields, input_eps=family.epsilon(fields), expert_scales=True
        ),
        "intermediate_size": fields.size("moe_intermediate_size"),
    }


GEMMA4 = family.Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    read=read,
    models="Gemma 4 E2B, E4B, 31B and 26B-A4B",
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
)
GEMMA4_UNIFIED = family.Family(
    architecture="Gemma4UnifiedForCausalLM",
    model_type="gemma4_unified_text",
    read=read_unified,
    models="Gemma 4 12B",
    defaults={**GEMMA4.defaults, "max_position_embeddings": 262_144, "sliding_window": 1024},
)
