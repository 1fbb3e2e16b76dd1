"""Falcon-H1: attention and Mamba-2 side by side in every layer, and multipliers instead of learning
rates that differ (maximal update parametrization)."""

from __future__ import annotations

import math

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.blocks.attention import Attention
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.mamba2 import Mamba2
from octavo.models.blocks.mixers import ParallelMixers
from octavo.models.blocks.mlp import MLP
from octavo.models.blocks.norms import Norms, RMSNorm
from octavo.models.config import ModelConfig
from octavo.models.families import family, mamba_fields
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.rope_fields import read_rope
from octavo.models.stored_names import StoredNames

_STORED = StoredNames(
    renamed=(
        ("post_attention_layernorm", "pre_ff_layernorm"),
        *((f"mlp.{name}_proj", f"feed_forward.{name}_proj") for name in ("gate", "up", "down")),
    )
)
_ONLY = {"attention_bias": False, "mamba_use_mlp": True, "projectors_bias": False}
"""Fields -> the value that is implemented."""
_IGNORED = ("mlp_expansion_factor", "num_logits_to_keep")
"""Fields of how it was made or is called, which transformers leaves unread."""


def read(fields: ConfigFields) -> ModelConfig:
    """A Falcon-H1 of a config.json's fields."""
    for name, allowed in _ONLY.items():
        fields.only(name, allowed)
    for name in _IGNORED:
        fields.ignore(name)
    mamba_fields.ignore(fields)
    family.layer_types(fields, ("hybrid",))
    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    mlp = MLP(
        intermediate_size=fields.size("intermediate_size"),
        activation=family.activation(fields),
        bias=fields.boolean("mlp_bias", default=False),
        gate_scale=gate,
        output_scale=down,
    )
    heads = family.heads(fields)
    # What multiplies the input of a product without a bias may as well multiply its output: of
    # queries and keys in their product, of values in what attention returns.
    taken = family.multiplier(fields, "attention_in_multiplier")
    keys = family.multiplier(fields, "key_multiplier")
    attention = Attention(
        **heads,
        rope=read_rope(fields),
        scale=taken * taken * keys / math.sqrt(heads["head_dim"]),
    )
    mixer = ParallelMixers(
        attention=attention,
        recurrent=_mamba(fields),
        attention_scale=taken * family.multiplier(fields, "attention_out_multiplier"),
        recurrent_scale=family.multiplier(fields, "ssm_out_multiplier"),
    )
    norms = Norms(norm=RMSNorm(eps=family.epsilon(fields, 1e-5)))
    layer = LayerSpec(mixer=mixer, feed_forward=mlp, norms=norms, stored=_STORED)
    embedding = family.multiplier(fields, "embedding_multiplier")
    logits = family.multiplier(fields, "lm_head_multiplier")
    return family.model(
        fields,
        [layer] * family.num_layers(fields),
        norms,
        embedding_scale=None if embedding == 1.0 else embedding,
        logit_scale=None if logits == 1.0 else logits,
        final_norm_stored="model.final_layernorm",
    )


def _mamba(fields: ConfigFields) -> Mamba2:
    first = fields.boolean("mamba_norm_before_gate", default=True)
    taken = family.multiplier(fields, "ssm_in_multiplier")
    scales = tuple(taken * each for each in _multipliers(fields, "ssm_multipliers", 5))
    normalizes = fields.boolean("mamba_rms_norm", default=False)
    return mamba_fields.mamba(
        fields,
        family.epsilon(fields, 1e-5),
        norm=("before_gate" if first else "after_gate") if normalizes else None,
        scales=() if set(scales) == {1.0} else scales,
    )


def _multipliers(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """A list of so many multipliers; ones if there is none.

    Raises:
        ModelLoadError: another list.
    """
    if fields.raw(name) is None:
        return (1.0,) * count
    found = fields.numbers(name)
    if len(found) != count or not all(each > 0 for each in found):
        raise ModelLoadError(
            f"{fields.where}: {name} = {shorten(list(found))} is not allowed: {count} numbers "
            f"above 0"
        )
    return found


FALCON_H1 = family.Family(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    read=read,
    models="Falcon-H1, Falcon-H1R",
)
