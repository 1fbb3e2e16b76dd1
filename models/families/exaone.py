"""EXAONE 4: norms of what attention and MLP return, and of queries and keys; where some layers
slide, the others rotate nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import UnsupportedModelError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.checks import MAX_SIZE, is_integer
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope

DEFAULT_EVERY = 4


def read(fields: ConfigFields) -> ModelConfig:
    """An EXAONE 4 of a config.json's fields."""
    rope = read_rope(fields)
    window = fields.size("sliding_window", default=None)
    pattern = fields.raw("sliding_window_pattern")
    every = _every(fields, pattern) if fields.raw("layer_types") is None else 1
    slides = family.slides(fields, lambda layer: window is not None and (layer + 1) % every != 0)
    norm = RMSNorm(eps=family.epsilon(fields, 1e-5))
    norms = Norms(norm=norm, before=False, after=True)
    by_kind = {
        slide: Attention(
            **family.heads(fields),
            rope=rope if slide or window is None else None,
            sliding_window=window if slide else None,
            qk_norm=norm,
        )
        for slide in (False, True)
    }
    mlp = family.gated_mlp(fields)
    layers = [family.layer(by_kind[slide], mlp, norms) for slide in slides]
    return family.model(fields, layers, norms)


def _every(fields: ConfigFields, pattern: object) -> int:
    """Of so many layers the last is global, of a file that does not say it layer by layer."""
    if pattern is None:
        return DEFAULT_EVERY
    if isinstance(pattern, str) and pattern and pattern == "L" * (len(pattern) - 1) + "G":
        return len(pattern)
    if isinstance(pattern, int) and is_integer(pattern, 1, MAX_SIZE):
        return pattern
    raise UnsupportedModelError(
        f"{fields.where}: sliding_window_pattern = {shorten(pattern)} is not supported: a number, "
        "or 'L's and a 'G'"
    )


def _from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    window = metadata.get("attention.sliding_window", int) or None
    every = None if window is None else DEFAULT_EVERY
    types = metadata.layer_types(fields["num_hidden_layers"], every)
    return {"sliding_window": window, **types}


EXAONE4 = family.Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    read=read,
    models="EXAONE 4",
    gguf="exaone4",
    gguf_keys=frozenset({"attention.sliding_window", "attention.sliding_window_pattern"}),
    gguf_fields=_from_gguf,
)
