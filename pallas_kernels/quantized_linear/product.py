"""The product of rows and a weight that are both eight bits wide, as each platform has it best."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from octavo.pallas_kernels.quantized_linear.rounding import quantize

if TYPE_CHECKING:  # its `apply` is this module's product
    from octavo.pallas_kernels.quantized_linear.weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Formulation:
    """How a platform's products are written.

    Attributes:
        min_rows: fewer rows are padded to as many.
        weight_first_rows: with as many rows or fewer the weight is the left operand, and its
            outputs are scaled as they come, [*outputs, T], before they are transposed; with more
            it is the right one.
        widen_fp8: products of fp8 are taken in float32, where the device has none of their own.
    """

    min_rows: int
    weight_first_rows: int
    widen_fp8: bool

    def __post_init__(self) -> None:
        if self.min_rows < 1:
            raise ValueError(f"min_rows = {self.min_rows} is not allowed: at least 1")


@cache
def formulations() -> dict[str, Formulation]:
    """`tuning.json`: platform -> formulation, with one named "default"."""
    table = json.loads(Path(__file__).with_name("tuning.json").read_text(encoding="utf-8"))
    return {
        platform: Formulation(entry["min_rows"], entry["weight_first_rows"], entry["widen_fp8"])
        for platform, entry in table.items()
    }


def quantized_linear(
    x: jax.Array, weight: QuantizedWeight, out_dtype: Any | None = None
) -> jax.Array:
    """x · weight, contracting x's last dimensions with the weight's inputs.

    Args:
        x: [T, *inputs], float32 or bfloat16.
        weight: see `QuantizedWeight`.
        out_dtype: of the result; None is x's.

    Returns:
        [T, *outputs].

    Raises:
        ValueError: x's last dimensions are not the weight's inputs.
    """
    inputs = weight.values.shape[weight.scale.ndim :]
    if x.shape[1:] != inputs:
        raise ValueError(f"x {x.shape}: want [T, {', '.join(map(str, inputs))}]")
    dims = tuple(range(1, x.ndim))
    values, row_scale = quantize(x, weight.quantization, dims)
    # Chosen when the program is lowered for a platform, which may not be the one at hand.
    table = formulations()
    branches = {name: partial(_product, how) for name, how in table.items() if name != "default"}
    out = jax.lax.platform_dependent(
        values,
        row_scale,
        weight.values,
        weight.scale,
        default=partial(_product, table["default"]),
        **branches,
    )
    return out.astype(x.dtype if out_dtype is None else out_dtype)


def ragged_quantized_linear(
    x: jax.Array, weight: QuantizedWeight, sizes: jax.Array, of_row: jax.Array
) -> jax.Array:
    """Groups of rows by a stack of weights, each group by its own: `quantized_linear` of each.

    Args:
        x: [R, K], float32 or bfloat16, rows of a group side by side.
        weight: of values [X, N, K] and scale [X, N].
        sizes: int32 [X], the groups' rows.
        of_row: int32 [R], each row's group; X or more behind the last.

    Returns:
        [R, N] in x's dtype; behind the last group, anything.
    """
    values, row_scale = quantize(x, weight.quantization, -1)
    table = formulations()
    branches = {name: partial(_ragged, how) for name, how in table.items() if name != "default"}
    default = partial(_ragged, table["default"])
    out = jax.lax.platform_dependent(values, weight.values, sizes, default=default, **branches)
    scale = jnp.take(weight.scale, of_row, axis=0, mode="clip")
    return (out.astype(jnp.float32) * (row_scale[:, None] * scale)).astype(x.dtype)


def _ragged(how: Formulation, x: jax.Array, weight: jax.Array, sizes: jax.Array) -> jax.Array:
    """[R, N] of values x [R, K] and weight [X, N, K], int32 or float32."""
    accumulator = jnp.int32 if weight.dtype == jnp.int8 else jnp.float32
    if weight.dtype != jnp.int8 and how.widen_fp8:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    out: jax.Array = jax.lax.ragged_dot_general(
        x, weight, sizes, dims, preferred_element_type=accumulator
    )
    return out


def _product(
    how: Formulation, x: jax.Array, row_scale: jax.Array, weight: jax.Array, scale: jax.Array
) -> jax.Array:
    """[T, *outputs] float32 of values x [T, *inputs] and weight [*outputs, *inputs]."""
    num_rows, num_outputs = x.shape[0], scale.ndim
    # One contracted dimension: with several, XLA's CPU backend leaves its fast products. A split
    # over devices stays one, because it is the first of them that is split.
    x = x.reshape(num_rows, -1)
    weight = weight.reshape(*scale.shape, -1)
    if num_rows < how.min_rows:
        x = jnp.pad(x, ((0, how.min_rows - num_rows), (0, 0)))
    accumulator = jnp.int32
    if weight.dtype != jnp.int8:
        accumulator = jnp.float32
        if how.widen_fp8:
            x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    if num_rows <= how.weight_first_rows:
        out = jax.lax.dot_general(
            weight, x, (((num_outputs,), (1,)), ((), ())), preferred_element_type=accumulator
        )
        by_row = row_scale.reshape(*(1,) * num_outputs, -1)
        out = out[..., :num_rows].astype(jnp.float32) * (scale[..., None] * by_row)
        # Without the barrier what follows would read the outputs across their order in memory.
        return jax.lax.optimization_barrier(jnp.moveaxis(out, -1, 0))
    out = jax.lax.dot_general(
        x, weight, (((1,), (num_outputs,)), ((), ())), preferred_element_type=accumulator
    )
    by_row = row_scale.reshape(-1, *(1,) * num_outputs)
    return out[:num_rows].astype(jnp.float32) * (by_row * scale[None])
