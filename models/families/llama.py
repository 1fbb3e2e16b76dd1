"""Llama, and whatever calls itself so: SmolLM2, Vicuna, TinyLlama."""

from __future__ import annotations

from octavo.models.blocks.attention import Attention
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope


def read(fields: ConfigFields) -> ModelConfig:
    """A Llama of a config.json's fields: equal layers of attention and a gated MLP."""
    bias = fields.boolean("attention_bias", default=False)
    attention = Attention(
        **family.heads(fields), rope=read_rope(fields), qkv_bias=bias, out_bias=bias
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields)))
    layers = [family.layer(attention, family.gated_mlp(fields), norms)] * family.num_layers(fields)
    return family.model(fields, layers, norms)


LLAMA = family.Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    read=read,
    models="Llama 2 and 3, SmolLM2, TinyLlama, Vicuna",
    real="SmolLM2-135M (GGUF)",
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    gguf="llama",
    gguf_pairs=True,
)
