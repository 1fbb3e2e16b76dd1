"""The screen of a decoder's output layer, beside its float32 weights, for greedy rows on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.models.config import ModelConfig
from octavo.pallas_kernels.screened_argmax import Screen, make_screen

NAME = "screen"
"""Of its place in the tree of weights."""


def can_be_screened(config: ModelConfig) -> bool:
    """Whether greedy tokens of the model can be found with a screen.

    Its output layer has to be its embedding table, of which a token's weights lie side by side, and
    logits have to be what they are: squeezed by a cap, several could be the largest.
    """
    return config.tie_word_embeddings and config.final_logit_softcap is None


def screen(weights: Mapping[str, Any]) -> Screen:
    """The screen, on the weights' device.

    Args:
        weights: of `declare(config, float32)`, on a mesh of one device.
    """
    made: Screen = _make(weights["embed"])
    return made


def abstract_screen(weights: Mapping[str, Any], mesh: Mesh) -> Screen:
    """What `screen` makes, as `jax.ShapeDtypeStruct`s with shardings.

    Args:
        weights: of `abstract_weights(config, float32, mesh)`.
    """
    sharding = NamedSharding(mesh, PartitionSpec())
    made: Screen = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(_make, weights["embed"]),
    )
    return made


_make = jax.jit(make_screen)
