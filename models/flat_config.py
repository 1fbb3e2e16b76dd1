"""A model whose layers differ in nothing but windows and rotary embeddings, in one call.

These fields are what `ModelConfig` was made of before layers had specs: checkpoints that were saved
then are read with them, and a model of equal layers is written down shortest so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.checks import MAX_LAYERS, check_flag, check_size
from octavo.models.config import ModelConfig
from octavo.models.config_dict import malformed, rope_from_dict
from octavo.models.layers import Activation
from octavo.models.rope import Rope

KINDS = ("global", "sliding")


def flat_config(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rms_norm_eps: float = 1e-6,
    activation: Activation = "silu",
    qkv_bias: bool = False,
    attention_out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
    norm_offset: float = 0.0,
    rope: Rope | None = None,
    local_rope: Rope | None = None,
    layer_kinds: tuple[str, ...] = (),
    sliding_window: int | None = None,
    attn_logit_softcap: float | None = None,
    query_scale: float = 0.0,
    kv_head_copies: int = 1,
    **whole: Any,
) -> ModelConfig:
    """A model of `num_layers` layers of attention and a gated MLP.

    Args:
        rope: of global layers; None is the default one.
        local_rope: of sliding layers; None is `rope`.
        layer_kinds: "global" or "sliding", one a layer; none are all global.
        sliding_window: of sliding layers, which need it.
        whole: other fields of `ModelConfig`.

    The others are fields of `Attention`, `MLP`, `Norms` and `RMSNorm`.

    Raises:
        ModelLoadError: a field that makes no sense.
        TypeError: a field that there is not.
    """
    check_size("num_layers", num_layers, MAX_LAYERS)
    check_flag("qk_norm", qk_norm)
    kinds = layer_kinds or ("global",) * num_layers
    if len(kinds) != num_layers or any(kind not in KINDS for kind in kinds):
        raise ModelLoadError(
            f"layer_kinds = {shorten(layer_kinds)} is not allowed: "
            f"{num_layers} times {' or '.join(KINDS)}"
        )
    if "sliding" in kinds:
        check_size("sliding_window", sliding_window)
    norm = RMSNorm(eps=rms_norm_eps, offset=norm_offset)

    def layer(kind: str) -> LayerSpec:
        slides = kind == "sliding"
        attention = Attention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=(local_rope if slides else None) or rope or Rope(),
            sliding_window=sliding_window if slides else None,
            logit_softcap=attn_logit_softcap,
            scale=query_scale,
            qkv_bias=qkv_bias,
            out_bias=attention_out_bias,
            qk_norm=norm if qk_norm else None,
            kv_head_copies=kv_head_copies,
        )
        mlp = MLP(intermediate_size=intermediate_size, activation=activation, bias=mlp_bias)
        norms = Norms(norm=norm, before=True, after=post_norms)
        return LayerSpec(mixer=attention, feed_forward=mlp, norms=norms)

    specs = {kind: layer(kind) for kind in kinds}
    layers = tuple(specs[kind] for kind in kinds)
    return ModelConfig(hidden_size=hidden_size, layers=layers, final_norm=norm, **whole)


def config_from_flat_dict(values: Mapping[str, Any]) -> ModelConfig:
    """The model of a checkpoint that was saved with these fields (format version 1).

    Raises:
        ModelLoadError: a field that is missing, unknown or malformed.
    """
    fields = dict(values)
    try:
        for name in ("rope", "local_rope"):
            if fields.get(name) is not None:
                fields[name] = rope_from_dict(fields[name])
        for name in ("layer_kinds", "eos_token_ids"):
            fields[name] = tuple(fields.get(name, ()))
        return flat_config(**fields)
    except ModelLoadError:
        raise
    except (TypeError, ValueError) as error:
        raise malformed(error) from error
