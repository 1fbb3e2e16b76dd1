"""gpt-oss: attention sinks, every other layer slides, and experts with biases and clamped gates."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import ALPHA, Experts
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope
from octavo.models.rope import Rope

_THETA = 150_000.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(fields: ConfigFields) -> ModelConfig:
    """A gpt-oss of a config.json's fields."""
    bias = fields.boolean("attention_bias", default=True)
    slides = family.slides(fields, lambda layer: layer % 2 == 0)
    window = fields.size("sliding_window", default=128) if any(slides) else None
    fields.ignore("initial_context_length")  # the rotary embedding says it
    rope = _rope(fields)
    by_kind = {
        slide: Attention(
            **family.heads(fields),
            rope=rope,
            sliding_window=window if slide else None,
            qkv_bias=bias,
            out_bias=bias,
            sinks=True,
        )
        for slide in (False, True)
    }
    fields.only("swiglu_alpha", ALPHA)
    fields.only("hidden_act", "silu")
    experts = Experts(
        router=expert_fields.router(fields, bias=True),
        intermediate_size=fields.size("intermediate_size"),
        gate_limit=fields.number("swiglu_limit", default=7.0),
        bias=True,
        names="gpt_oss",
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields, 1e-5)))
    layers = [family.layer(by_kind[slide], experts, norms) for slide in slides]
    return family.model(fields, layers, norms)


def _rope(fields: ConfigFields) -> Rope:
    """As the file says, or that of all models there are."""
    if fields.raw("rope_parameters") or fields.raw("rope_scaling"):
        return read_rope(fields, _THETA)
    longest = fields.size("max_position_embeddings")
    theta = fields.number("rope_theta", default=_THETA)
    known = {"max_position_embeddings": longest, "rope_scaling": _YARN}
    return read_rope(ConfigFields(known), theta)


GPT_OSS = family.Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    read=read,
    models="gpt-oss-20b and 120b, in bfloat16 and MXFP4",
)
