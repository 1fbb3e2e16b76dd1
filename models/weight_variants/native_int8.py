"""The int8 weights of a decoder for native products: the same arrays, marked."""

from __future__ import annotations

from typing import Any

import jax

from octavo.pallas_kernels.cpu.native_int8_linear import NativeInt8Weight
from octavo.pallas_kernels.quantized_linear import QuantizedWeight


def native_int8_weights(weights: Any) -> Any | None:
    """The tree of weights with products of int8 by a native function; None where it has none.

    Args:
        weights: as a step reads them, or their `jax.ShapeDtypeStruct`s. The arrays are shared.
    """

    def one(weight: Any) -> Any:
        return NativeInt8Weight(weight=weight) if is_int8(weight) else weight

    def is_int8(weight: Any) -> bool:
        return isinstance(weight, QuantizedWeight) and weight.quantization == "int8"

    leaves = jax.tree.leaves(weights, is_leaf=is_int8)
    has_some = any(is_int8(leaf) for leaf in leaves)
    return jax.tree.map(one, weights, is_leaf=is_int8) if has_some else None
