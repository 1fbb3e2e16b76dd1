"""A float32 weight as int8 digits.

Shape suffixes: N outputs and K inputs, each flattened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax

from octavo.pallas_kernels.cpu.int8_split_linear.digits import digits
from octavo.pallas_kernels.cpu.int8_split_linear.kernel import int8_split_linear
from octavo.pallas_kernels.linear_weight import LinearWeight


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class Int8SplitWeight(LinearWeight):
    """weight = (high + middle / BASE + low / BASE²) · scale, one scale for each output.

    Attributes:
        high, middle, low: int8 [N, K], digits.
        scale: float32 [N].
        outputs: the outputs' dimensions, static.
    """

    high: jax.Array
    middle: jax.Array
    low: jax.Array
    scale: jax.Array
    outputs: tuple[int, ...] = field(metadata={"static": True})

    def apply(self, x: jax.Array, num_inputs: int = 1, out_dtype: Any | None = None) -> jax.Array:
        return int8_split_linear(x, self).astype(x.dtype if out_dtype is None else out_dtype)


def split_weight(weight: jax.Array, num_inputs: int) -> Int8SplitWeight:
    """Cuts a weight into digits, each output by its own largest magnitude.

    Args:
        weight: float32 [*inputs, *outputs].
        num_inputs: dimensions that are inputs.
    """
    outputs = weight.shape[num_inputs:]
    rows = weight.reshape(-1, math.prod(outputs)).T
    (high, middle, low), scale = digits(rows)
    return Int8SplitWeight(high=high, middle=middle, low=low, scale=scale[:, 0], outputs=outputs)
