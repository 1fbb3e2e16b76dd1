"""Phi-3 and Phi-4: Llama with fused projections, a context stretched by longrope, and, in the small
ones, heads of which a part is rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.gguf_metadata import Metadata
from octavo.models.families.rope_fields import read_rope
from octavo.models.stored_names import FUSED_GATE_UP, FUSED_QKV, StoredNames

_STORED = StoredNames(fused=(FUSED_QKV, FUSED_GATE_UP))
_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}


def read(fields: ConfigFields) -> ModelConfig:
    """A Phi-3 or Phi-4 of a config.json's fields."""
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields, fraction=1.0, renamed=_OLD_NAMES),
        sliding_window=fields.size("sliding_window", default=None),
    )
    fields.ignore("original_max_position_embeddings")  # of a context that is not stretched
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)
    for name in ("full_attn_mod", "interpolate_factor"):
        fields.only(name, 1)  # of Phi-4-mini's own code
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields, 1e-5)))
    layer = family.layer(attention, family.gated_mlp(fields), norms, _STORED)
    return family.model(fields, [layer] * family.num_layers(fields), norms)


def _from_gguf(metadata: Metadata, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Files say a window of 0 where there is none, and how many dimensions are rotated."""
    head_dim = fields["head_dim"]
    return {
        "sliding_window": metadata.get("attention.sliding_window", int) or None,
        "partial_rotary_factor": metadata.size("rope.dimension_count", head_dim) / head_dim,
    }


PHI3 = family.Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    read=read,
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    names_own_code=True,
    gguf="phi3",
    gguf_keys=frozenset(
        {"attention.sliding_window", "rope.dimension_count", "rope.scaling.attn_factor"}
    ),
    gguf_fields=_from_gguf,
)
