"""float32 products by Eigen in a program whose other products are YNNPACK's.

XLA's CPU compiler takes its library for a whole program (`product_library.py`), and Eigen has
float32 alone: a program with a product in bfloat16 is YNNPACK's. But YNNPACK takes no product whose
left-hand side is turned, inputs by rows, and leaves it to Eigen, which reads it either way.
Turning costs a few hundredths of a product of up to 128 rows, and a seventh of one of 512.

The plain reference is `linear_weight.DenseWeight`: the same product, not turned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from octavo.pallas_kernels.linear_weight import LinearWeight


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class EigenWeight(LinearWeight):
    """A weight whose products Eigen is to compute.

    Attributes:
        weight: float32 [*inputs, *outputs].
    """

    weight: jax.Array

    def apply(self, x: jax.Array, num_inputs: int = 1, out_dtype: Any | None = None) -> jax.Array:
        out = eigen_linear(x, self, num_inputs)
        return out.astype(x.dtype if out_dtype is None else out_dtype)


def eigen_linear(x: jax.Array, weight: EigenWeight, num_inputs: int = 1) -> jax.Array:
    """x · weight, contracting x's last `num_inputs` dimensions with the weight's first ones.

    Args:
        x: float32 [T, *inputs].
        weight: on a CPU; on other devices, and where the compiler has one library, it is no
            different from another product.

    Returns:
        [T, *outputs] float32.
    """
    outputs = weight.weight.shape[num_inputs:]
    turned = lax.optimization_barrier(x.reshape(x.shape[0], -1).T)  # else it is turned back
    out = lax.dot_general(
        turned,
        weight.weight.reshape(turned.shape[0], -1),
        dimension_numbers=(((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
    )
    return out.reshape(x.shape[0], *outputs)
