"""Fields of a config.json that say how attention over latents (MLA) is made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import UnsupportedModelError
from octavo.models.blocks.latent_attention import LatentAttention
from octavo.models.checks import check_positive
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope, yarn_amplitude

_OF_INDEXER = ("index_topk", "index_n_heads", "index_head_dim")
"""Fields of an indexer, which has each query see few keys."""


def attention(
    fields: ConfigFields,
    *,
    pairs: bool,
    default: Mapping[str, Any] | None = None,
    has_temperature: bool = False,
    whole_head: bool = False,
    value_size: int | None = None,
) -> LatentAttention:
    """The attention that all layers have.

    Args:
        pairs: whether numbers that are rotated together lie side by side on disk.
        default: the rotary embedding, where the file says none.
        has_temperature: whether the family's queries have one, by position.
        whole_head: `partial_rotary_factor` is of a head's numbers all together. Other families take
            it of those that are rotated, where it is 1.
        value_size: what an absent `v_head_dim` means; None if it must be there.

    Raises:
        UnsupportedModelError: a field of other mathematics, by name.
        ModelLoadError: a field that is missing or malformed.
    """
    for name in _OF_INDEXER:
        fields.only(name, None)
    fields.only("attention_bias", False)
    num_heads = fields.size("num_attention_heads")
    fields.only("num_key_value_heads", num_heads)
    nope_size, rope_size = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    fields.only("qk_head_dim", nope_size + rope_size)
    fields.ignore("head_dim")  # of what is rotated, or of all: files disagree
    fraction = rope_size / (nope_size + rope_size) if whole_head else 1.0
    rope = read_rope(
        fields, default=default, fraction=fraction, pairs=pairs, has_temperature=has_temperature
    )
    if rope.fraction != fraction:
        raise UnsupportedModelError(
            f"{fields.where}: partial_rotary_factor = {rope.fraction} is not supported: {fraction}"
        )
    default_value = {} if value_size is None else {"default": value_size}
    said = fields.raw("rope_parameters") or fields.raw("rope_scaling") or default
    return LatentAttention(
        num_heads=num_heads,
        latent_size=fields.size("kv_lora_rank"),
        nope_size=nope_size,
        rope_size=rope_size,
        value_size=fields.size("v_head_dim", **default_value),
        query_size=fields.size("q_lora_rank", default=None),
        rope=dataclasses.replace(rope, fraction=1.0),
        scale=_stretch(said) ** 2 / math.sqrt(nope_size + rope_size),
    )


def _stretch(said: Mapping[str, Any] | None) -> float:
    """What multiplies queries and keys alike, of a context that was stretched.

    Args:
        said: of the rotary embedding, as `read_rope` has checked it.
    """
    if said is None:
        return 1.0
    fields = ConfigFields(said, where="config.json: rope scaling")
    kind = fields.text("rope_type", default=None) or fields.text("type", default="default")
    scale = fields.number("mscale_all_dim", default=0.0)
    if kind == "default" or scale == 0.0:
        return 1.0
    check_positive("mscale_all_dim", scale)
    return yarn_amplitude(fields.number("factor"), scale)
