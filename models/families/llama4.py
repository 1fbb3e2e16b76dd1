"""Llama 4: attention in chunks with a rotary embedding, and every fourth layer over everything
without one; routed experts, whose inputs their shares multiply, beside a shared one."""

from __future__ import annotations

from typing import Any

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.checks import is_integer
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope
from octavo.models.rope import Rope, Temperature
from octavo.models.stored_names import StoredNames

_THETA = 500_000.0
_CHUNK = 8192
_DENSE = StoredNames(
    renamed=tuple((f"mlp.{name}", f"feed_forward.{name}") for name in
                  ("gate_proj", "up_proj", "down_proj"))
)  # fmt: skip


def read(fields: ConfigFields) -> ModelConfig:
    """A Llama 4 of a config.json's fields."""
    chunk = None
    if fields.number("attention_chunk_size", default=_CHUNK, absent=None) is not None:
        chunk = fields.size("attention_chunk_size", default=_CHUNK)
    family.need_head_dim(fields)
    bias = fields.boolean("attention_bias", default=False)
    norm = RMSNorm(eps=family.epsilon(fields, 1e-5))
    norms = Norms(norm=norm)
    # Rotation changes no length: what is normalized behind it may be before.
    qk_norm = None
    if fields.boolean("use_qk_norm", default=True):
        qk_norm = RMSNorm(eps=norm.eps, weighted=False)
    rope, no_rope = read_rope(fields, _THETA, pairs=True), _no_rope(fields)
    activation = family.activation(fields)
    experts = Experts(
        router=expert_fields.router(fields, scores="sigmoid", normalizes=False, scales_inputs=True),
        intermediate_size=fields.size("intermediate_size"),
        activation=activation,
        shared_size=fields.size("intermediate_size"),
        names="llama4",
    )
    dense = MLP(intermediate_size=fields.size("intermediate_size_mlp"), activation=activation)

    def attention(rotates: bool, is_chunked: bool) -> Attention:
        return Attention(
            **family.heads(fields),
            rope=rope if rotates else no_rope,
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=qk_norm if rotates else None,
            attention_chunk=chunk if is_chunked else None,
        )

    rotating = _rotating(fields)
    layers = [
        family.layer(attention(*kind), experts, norms)
        if is_sparse
        else family.layer(attention(*kind), dense, norms, _DENSE)
        for kind, is_sparse in zip(
            zip(rotating, _chunked(fields, rotating), strict=True), _sparse(fields), strict=True
        )
    ]
    return family.model(fields, layers, norms)


def _no_rope(fields: ConfigFields) -> Rope | None:
    """What layers without a rotary embedding do to queries: they may grow with their positions."""
    beta = fields.number("attn_scale", default=0.1)
    span = fields.size("floor_scale", default=8192)
    if not fields.boolean("attn_temperature_tuning", default=True) or beta == 0.0:
        return None
    return Rope(fraction=0.0, temperature=Temperature(beta=beta, span=span, first=1))


def _rotating(fields: ConfigFields) -> list[bool]:
    """Which layers have a rotary embedding: those that `no_rope_layers` has a 1 for, or three of
    four.

    Raises:
        ModelLoadError: not a 0 or 1 for each layer.
    """
    number, every = family.num_layers(fields), fields.size("no_rope_layer_interval", default=4)
    marks: Any = fields.raw("no_rope_layers")
    if not marks:
        return [(layer + 1) % every != 0 for layer in range(number)]
    if (
        not isinstance(marks, list)
        or len(marks) < number
        or any(each not in (0, 1) for each in marks)
    ):
        raise ModelLoadError(
            f"{fields.where}: no_rope_layers = {shorten(marks)} is not allowed: a list of 0 and 1, "
            f"one for each of num_hidden_layers ({number})"
        )
    return [bool(each) for each in marks[:number]]


def _chunked(fields: ConfigFields, rotating: list[bool]) -> list[bool]:
    """Which layers attend in chunks: as `layer_types` says, or those that rotate."""
    named = family.layer_types(fields, ["chunked_attention", "full_attention"])
    return rotating if named is None else [name == "chunked_attention" for name in named]


def _sparse(fields: ConfigFields) -> list[bool]:
    """Which layers have experts.

    Raises:
        ModelLoadError: `moe_layers` is no list of layers.
    """
    number, step = family.num_layers(fields), fields.size("interleave_moe_layer_step", default=1)
    listed: Any = fields.raw("moe_layers")
    if listed is None:
        return [(layer + 1) % step == 0 for layer in range(number)]
    if not isinstance(listed, list) or not all(is_integer(each, 0, number - 1) for each in listed):
        raise ModelLoadError(
            f"{fields.where}: moe_layers = {shorten(listed)} is not allowed: a list of layers from "
            f"0 to {number - 1}"
        )
    return [layer in listed for layer in range(number)]


LLAMA4 = family.Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    read=read,
    models="Llama 4 Scout and Maverick (text)",
    defaults={
        "vocab_size": 202_048,
        "attention_chunk_size": 8192,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
)
