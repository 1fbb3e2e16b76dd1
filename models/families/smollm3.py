"""SmolLM3: Llama, of whose layers every fourth rotates nothing."""

from __future__ import annotations

import dataclasses

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope

DEFAULT_THETA = 2_000_000.0


def read(fields: ConfigFields) -> ModelConfig:
    """A SmolLM3 of a config.json's fields."""
    bias = fields.boolean("attention_bias", default=False)
    plain = Attention(
        **family.heads(fields),
        rope=read_rope(fields, DEFAULT_THETA),
        qkv_bias=bias,
        out_bias=bias,
    )
    fields.ignore("max_window_layers")  # read by nothing: flags say which layers slide
    rotated = _rotated(fields)
    window = fields.size("sliding_window", default=None)
    if not fields.boolean("use_sliding_window", default=False):
        window = None
    slides = family.slides(fields, lambda layer: window is not None and not rotated[layer])
    mlp = family.gated_mlp(fields)
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields)))

    def layer(rotates: bool, slide: bool) -> Attention:
        return dataclasses.replace(
            plain,
            rope=plain.rope if rotates else None,
            sliding_window=window if slide else None,
        )

    layers = [family.layer(layer(*kind), mlp, norms) for kind in zip(rotated, slides, strict=True)]
    return family.model(fields, layers, norms, tied=True)


def _rotated(fields: ConfigFields) -> list[bool]:
    """Which layers rotate: those whose flag in `no_rope_layers` is 1, whatever the field's name."""
    number = family.num_layers(fields)
    every = fields.size("no_rope_layer_interval", default=4)
    flags = fields.raw("no_rope_layers")
    if flags is None:
        return [(layer + 1) % every != 0 for layer in range(number)]
    if not isinstance(flags, list) or len(flags) != number or any(f not in (0, 1) for f in flags):
        raise ModelLoadError(
            f"{fields.where}: no_rope_layers = {shorten(flags)} is not allowed: {number} flags of "
            "0 or 1"
        )
    return [bool(flag) for flag in flags]


SMOLLM3 = family.Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    read=read,
    models="SmolLM3",
    gguf="smollm3",  # whose files say nothing of layers: every fourth rotates nothing
    gguf_pairs=True,
)
