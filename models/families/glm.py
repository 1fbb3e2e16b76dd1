"""GLM-4 dense: half of each head is rotated, in pairs, and gate and up are one tensor. The models
of 2025 have norms of what attention and MLP return, too."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope
from octavo.models.stored_names import FUSED_GATE_UP, StoredNames

DEFAULT_EPSILON = 1.5625e-07
_STORED = StoredNames(fused=(FUSED_GATE_UP,))
_STORED_GLM4 = StoredNames(
    renamed=(
        ("post_attention_layernorm", "post_self_attn_layernorm"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "post_mlp_layernorm"),
    ),
    fused=(FUSED_GATE_UP,),
)


def read_glm(fields: ConfigFields) -> ModelConfig:
    """A GLM-4 of 2024, of a config.json's fields."""
    return _read(fields, after=False, stored=_STORED)


def read_glm4(fields: ConfigFields) -> ModelConfig:
    """A GLM-4 of 2025, of a config.json's fields."""
    return _read(fields, after=True, stored=_STORED_GLM4)


def _read(fields: ConfigFields, *, after: bool, stored: StoredNames) -> ModelConfig:
    attention = Attention(
        **family.heads(fields),
        rope=read_rope(fields, fraction=0.5, pairs=True),
        qkv_bias=fields.boolean("attention_bias", default=True),
    )
    fields.only("mlp_bias", False)
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields, DEFAULT_EPSILON)), after=after)
    layer = family.layer(attention, family.gated_mlp(fields), norms, stored)
    return family.model(fields, [layer] * family.num_layers(fields), norms)


GLM = family.Family(
    architecture="GlmForCausalLM", model_type="glm", read=read_glm, models="GLM-4 9B (2024)"
)
GLM4 = family.Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    read=read_glm4,
    models="GLM-4 9B and 32B (2025), GLM-Z1",
)
