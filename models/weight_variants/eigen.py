"""The linear layers of a decoder as Eigen is to multiply with them: the same arrays, marked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.quantization import NUM_INPUTS
from octavo.models.weight_variants.tree import VariantTree
from octavo.pallas_kernels.cpu.eigen_linear import EigenWeight


def eigen_weights(weights: Mapping[str, Any]) -> VariantTree:
    """The linear layers, marked.

    Args:
        weights: of `declare(config, float32)`, or their `jax.ShapeDtypeStruct`s.
    """

    def of(layer: Mapping[str, Any]) -> dict[str, EigenWeight]:
        return {name: EigenWeight(weight=layer[name]) for name in NUM_INPUTS if name in layer}

    return {**of(weights), "layers": tuple(map(of, weights["layers"]))}
