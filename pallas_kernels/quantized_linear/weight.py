"""A linear layer's weight in eight bits, and how it is made.

Shape suffixes: *outputs and *inputs, the dimensions a product yields and those it contracts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.linear_weight import EmbeddingTable
from octavo.pallas_kernels.quantized_linear.product import quantized_linear
from octavo.pallas_kernels.quantized_linear.rounding import Quantization, quantize


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight(EmbeddingTable):
    """weight = values · scale, one scale for each output.

    Inputs are the last dimensions, side by side in memory: the order that integer and fp8 products
    of CPUs and GPUs read without packing. Scales are split over devices as outputs are.

    Attributes:
        values: int8 or float8_e4m3fn [*outputs, *inputs].
        scale: float32 [*outputs].
        dtype: of the weight it stands for, static.
    """

    values: jax.Array
    scale: jax.Array
    dtype: jnp.dtype = field(metadata={"static": True})

    @property
    def num_inputs(self) -> int:
        """Dimensions that a product contracts."""
        return self.values.ndim - self.scale.ndim

    @property
    def quantization(self) -> Quantization:
        return "int8" if self.values.dtype == jnp.int8 else "fp8"

    def apply(self, x: jax.Array, num_inputs: int = 1, out_dtype: Any | None = None) -> jax.Array:
        return quantized_linear(x, self, out_dtype)

    def dequantized(self) -> jax.Array:
        """The weight [*outputs, *inputs] in `dtype`."""
        scale = self.scale.reshape(*self.scale.shape, *(1,) * self.num_inputs)
        return (self.values.astype(jnp.float32) * scale).astype(self.dtype)

    def rows(self, ids: jax.Array) -> jax.Array:
        """Some outputs' weights [T, *inputs] in `dtype`; ids int32[T], clipped to what there is.

        What an embedding table that is also the output layer is read with.
        """
        values = jnp.take(self.values, ids, axis=0, mode="clip").astype(jnp.float32)
        scale = jnp.take(self.scale, ids, axis=0, mode="clip")
        return (values * scale.reshape(-1, *(1,) * (values.ndim - 1))).astype(self.dtype)


def quantize_weight(
    weight: jax.Array, quantization: Quantization, num_inputs: int, *, inputs_first: bool = True
) -> QuantizedWeight:
    """Rounds a weight to eight bits, each output by its own largest magnitude.

    Args:
        weight: [*inputs, *outputs], or [*outputs, *inputs] if not `inputs_first`. Not donated.
        quantization: "int8" or "fp8" (float8_e4m3fn).
        num_inputs: dimensions that are inputs.
    """
    if inputs_first:
        order = (*range(num_inputs, weight.ndim), *range(num_inputs))
        outputs_first = weight.transpose(order)
    else:
        outputs_first = weight
    inputs = tuple(range(weight.ndim - num_inputs, weight.ndim))
    values, scale = quantize(outputs_first, quantization, inputs)
    return QuantizedWeight(values=values, scale=scale, dtype=jnp.dtype(weight.dtype))
