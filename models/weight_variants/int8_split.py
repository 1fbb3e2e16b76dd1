"""The linear layers of a decoder split into int8 digits, for steps of many rows on a CPU.

They come beside the float32 weights, which steps of few rows multiply with. The output layer is not
split: its sums are too many for a core's caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from octavo.models.quantization import NUM_INPUTS
from octavo.models.weight_variants.tree import VariantTree, abstract_on
from octavo.pallas_kernels.cpu.int8_split_linear import MAX_INPUTS, Int8SplitWeight, split_weight


def int8_split_weights(weights: Mapping[str, Any]) -> VariantTree:
    """The linear layers, split on their device. Nothing is donated.

    Args:
        weights: of `declare(config, float32)`, on a mesh of one device.
    """
    return _tree(weights, lambda weight, split: split(weight))


def abstract_int8_split_weights(weights: Mapping[str, Any], mesh: Mesh) -> VariantTree:
    """What `int8_split_weights` makes, as `jax.ShapeDtypeStruct`s with shardings.

    Args:
        weights: of `abstract_weights(config, float32, mesh)`.
    """
    return _tree(weights, lambda weight, split: abstract_on(mesh, split, weight))


_split = jax.jit(split_weight, static_argnames="num_inputs")


def _tree(
    weights: Mapping[str, Any],
    one: Callable[[Any, Callable[[Any], Int8SplitWeight]], Int8SplitWeight],
) -> VariantTree:
    """What `one` makes of each layer whose sums of digits an int32 holds."""

    def of(layer: Mapping[str, Any]) -> dict[str, Int8SplitWeight]:
        made = {}
        for name, num_inputs in names.items():
            weight = layer.get(name)
            if weight is not None and math.prod(weight.shape[:num_inputs]) <= MAX_INPUTS:
                made[name] = one(weight, partial(_split, num_inputs=num_inputs))
        return made

    names = {name: number for name, number in NUM_INPUTS.items() if name != "lm_head"}
    return {"layers": tuple(of(layer) for layer in weights["layers"])}
