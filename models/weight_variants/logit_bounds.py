"""Bounds of a decoder's logits, beside its float32 weights, for greedy rows on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from octavo.models.config import ModelConfig
from octavo.models.weight_variants.tree import abstract_on
from octavo.pallas_kernels.cpu.bounded_argmax import LogitBounds, make_logit_bounds


def can_bound_logits(config: ModelConfig) -> bool:
    """Whether greedy tokens of the model can be found by bounds of its logits.

    Its output layer has to be its embedding table, of which a token's weights lie side by side, and
    logits have to be what they are: squeezed by a cap, several could be the largest.
    """
    is_plain = config.final_logit_softcap is None and not config.output_bias
    return config.tie_word_embeddings and is_plain


def logit_bounds(weights: Mapping[str, Any]) -> LogitBounds:
    """The bounds, on the weights' device.

    Args:
        weights: of `declare(config, float32)`, on a mesh of one device.
    """
    made: LogitBounds = _make(weights["embed"])
    return made


def abstract_logit_bounds(weights: Mapping[str, Any], mesh: Mesh) -> LogitBounds:
    """What `logit_bounds` makes, as `jax.ShapeDtypeStruct`s with shardings.

    Args:
        weights: of `abstract_weights(config, float32, mesh)`.
    """
    return abstract_on(mesh, make_logit_bounds, weights["embed"])


_make = jax.jit(make_logit_bounds)
