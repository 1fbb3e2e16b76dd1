"""The linear layers of a decoder cut into int8 digits, for steps of many rows on a CPU.

They come beside the float32 weights, which steps of few rows multiply with. The output layer is not
sliced: its sums are too many for a core's caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.models.packed_tree import Packed
from octavo.models.quantization import NUM_INPUTS
from octavo.pallas_kernels.sliced_linear import MAX_INPUTS, SlicedWeight, slice_weight

Sliced = Packed
"""Sliced weights by their places in the tree of `declare`, as packed ones."""


def sliced_weights(weights: Mapping[str, Any]) -> Sliced:
    """The linear layers, sliced on their device. Nothing is donated.

    Args:
        weights: of `declare(config, float32)`, on a mesh of one device.
    """
    return _tree(weights, lambda weight, program: program(weight))


def abstract_sliced_weights(weights: Mapping[str, Any], mesh: Mesh) -> Sliced:
    """What `sliced_weights` makes, as `jax.ShapeDtypeStruct`s with shardings.

    Args:
        weights: of `abstract_weights(config, float32, mesh)`.
    """
    sharding = NamedSharding(mesh, PartitionSpec())

    def one(weight: Any, program: Callable[[Any], SlicedWeight]) -> SlicedWeight:
        sliced: SlicedWeight = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(program, weight),
        )
        return sliced

    return _tree(weights, one)


_slice = jax.jit(slice_weight, static_argnames="num_inputs")


def _tree(
    weights: Mapping[str, Any],
    one: Callable[[Any, Callable[[Any], SlicedWeight]], SlicedWeight],
) -> Sliced:
    """What `one` makes of each layer whose sums of digits an int32 holds."""

    def of(layer: Mapping[str, Any]) -> dict[str, SlicedWeight]:
        made = {}
        for name, num_inputs in names.items():
            weight = layer[name]
            if math.prod(weight.shape[:num_inputs]) <= MAX_INPUTS:
                made[name] = one(weight, partial(_slice, num_inputs=num_inputs))
        return made

    names = {name: number for name, number in NUM_INPUTS.items() if name != "lm_head"}
    return {"layers": tuple(of(layer) for layer in weights["layers"])}
