"""LFM2: gated short convolutions in most layers, attention in some; dense, or with routed experts
in all layers but the first."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.experts import Experts
from octavo.models.blocks.layer import FeedForward, LayerSpec
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.blocks.short_conv import ShortConv
from octavo.models.checks import is_integer
from octavo.models.config import ModelConfig
from octavo.models.families import expert_fields, family
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope
from octavo.models.stored_names import StoredNames

_STORED = StoredNames(
    renamed=(
        ("input_layernorm", "operator_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.q_norm", "self_attn.q_layernorm"),
        ("self_attn.k_norm", "self_attn.k_layernorm"),
        ("self_attn.o_proj", "self_attn.out_proj"),
        ("mlp.gate_proj", "feed_forward.w1"),
        ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"),
    )
)
_UNUSED = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "theta",
)
"""Fields of older files, of training or said by another field, which transformers leaves unread."""
_TYPES = ("conv", "full_attention")


def read(fields: ConfigFields) -> ModelConfig:
    """An LFM2 of a config.json's fields."""
    mlp = MLP(intermediate_size=_mlp_size(fields), activation="silu")
    return _model(fields, [mlp] * family.num_layers(fields))


def read_moe(fields: ConfigFields) -> ModelConfig:
    """An LFM2 with experts, of a config.json's fields."""
    mlp = MLP(intermediate_size=fields.size("intermediate_size"), activation="silu")
    experts = Experts(
        router=expert_fields.router(
            fields,
            scores="sigmoid",
            normalizes=fields.boolean("norm_topk_prob", default=True),
            corrects=fields.boolean("use_expert_bias", default=True),
            scale=fields.number("routed_scaling_factor", default=1.0),
        ),
        intermediate_size=fields.size("moe_intermediate_size"),
        names="lfm2",
    )
    number = family.num_layers(fields)
    num_dense = fields.integer("num_dense_layers", default=2)
    if not is_integer(num_dense, 0, number):
        raise ModelLoadError(
            f"{fields.where}: num_dense_layers = {shorten(num_dense)} is not allowed: "
            f"0 to {number}, by num_hidden_layers"
        )
    return _model(fields, [mlp] * num_dense + [experts] * (number - num_dense))


def _model(fields: ConfigFields, feed_forwards: Sequence[FeedForward]) -> ModelConfig:
    for name in _UNUSED:
        fields.ignore(name)
    for name in ("use_pos_enc", "block_use_swiglu"):
        fields.only(name, True)
    norm = RMSNorm(eps=fields.number("norm_eps", default=1e-5))
    norms = Norms(norm=norm)
    attention = Attention(**family.heads(fields), rope=read_rope(fields, 1_000_000.0), qk_norm=norm)
    conv = ShortConv(
        size=fields.size("hidden_size"),
        width=fields.size("conv_L_cache", default=3),
        bias=fields.boolean("conv_bias", default=False),
    )
    layers = [
        LayerSpec(
            mixer=conv if is_conv else attention,
            feed_forward=feed_forward,
            norms=norms,
            stored=_STORED,
        )
        for is_conv, feed_forward in zip(_convs(fields), feed_forwards, strict=True)
    ]
    tied = fields.boolean("tie_embedding", default=True)
    return family.model(fields, layers, norms, tied=tied, final_norm_stored="model.embedding_norm")


def _mlp_size(fields: ConfigFields) -> int:
    """Width of the MLP, which files may leave to be worked out."""
    size: int = fields.size("block_ff_dim", default=None) or fields.size("intermediate_size")
    fields.ignore("intermediate_size")
    adjusts = fields.boolean("block_auto_adjust_ff_dim", default=True)
    multiplier = fields.number("block_ffn_dim_multiplier", default=1.0)
    multiple = fields.size("block_multiple_of", default=256)
    if not adjusts:
        return size
    size = int(int(2 * size / 3) * multiplier)
    return multiple * -(-size // multiple)


def _convs(fields: ConfigFields) -> list[bool]:
    """Which layers convolve; the others attend.

    Raises:
        ModelLoadError: the numbers of layers that attend are no list.
    """
    number, types = family.num_layers(fields), family.layer_types(fields, _TYPES)
    attends = fields.raw("full_attn_idxs")
    if types is not None:
        return [each == "conv" for each in types]
    indices = range(number) if attends is None else attends
    if not isinstance(indices, (list, range)):
        raise ModelLoadError(
            f"{fields.where}: full_attn_idxs = {shorten(attends)} is not allowed: a list"
        )
    return [layer not in indices for layer in range(number)]


LFM2 = family.Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    read=read,
    models="LFM2 and LFM2.5, dense",
)
LFM2_MOE = family.Family(
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    read=read_moe,
    models="LFM2-8B-A1B",
)
