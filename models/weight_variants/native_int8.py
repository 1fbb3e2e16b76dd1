"""The int8 weights of a decoder for native products: the same arrays, marked."""

from __future__ import annotations

import math
from typing import Any

import jax

from octavo.pallas_kernels.cpu.native_int8_linear import NativeInt8Weight
from octavo.pallas_kernels.quantized_linear import QuantizedWeight


def has_int8(weights: Any) -> bool:
    """Whether a tree of weights has some of int8."""
    return bool(int8_shapes(weights))


def int8_shapes(weights: Any) -> list[tuple[int, int]]:
    """Inputs and outputs of each shape that a tree has int8 weights of."""
    found = [leaf for leaf in jax.tree.leaves(weights, is_leaf=_is_int8) if _is_int8(leaf)]
    outputs = [math.prod(weight.scale.shape) for weight in found]
    shapes = [(weight.values.size // n, n) for weight, n in zip(found, outputs, strict=True)]
    return sorted(set(shapes))


def native_int8_weights(weights: Any) -> Any:
    """The tree of weights with products of int8 by a native function.

    Args:
        weights: as a step reads them, or their `jax.ShapeDtypeStruct`s. The arrays are shared.
    """

    def one(weight: Any) -> Any:
        return NativeInt8Weight(weight=weight) if _is_int8(weight) else weight

    return jax.tree.map(one, weights, is_leaf=_is_int8)


def _is_int8(weight: Any) -> bool:
    return isinstance(weight, QuantizedWeight) and weight.quantization == "int8"
