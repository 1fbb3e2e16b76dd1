"""A linear layer's weight that stays as its checkpoint stores it, on any device.

A step dequantizes it where it multiplies with it, and gives the memory back: the numbers are those
of a weight that was dequantized when it was loaded, and so are the products. What is spared is
memory, not time: a step writes and reads the weight once more than one of a dense weight. Decode
steps of few rows on a CPU have kernels that read the blocks (`cpu/block_quantized_linear`).

Shape suffixes: T tokens, *outputs and *inputs, the dimensions a product yields and those it
contracts; B, C and H as in `stored_blocks`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.linear_weight import EmbeddingTable, dense_product
from octavo.pallas_kernels.stored_blocks import Blocks, BlockType


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight(EmbeddingTable):
    """weight = code · scale + minimum, in float32, rounded once to `dtype`.

    Attributes:
        codes: uint8 (two a byte: see `BlockType`) or int8 [*outputs, B, H].
        scale: float16 or float32 [*outputs, B].
        minimum: the same, or None.
        inputs: the inputs' dimensions, static; B · C in all.
        dtype: of the weight it stands for, static.
    """

    codes: jax.Array
    scale: jax.Array
    minimum: jax.Array | None
    inputs: tuple[int, ...] = field(metadata={"static": True})
    dtype: jnp.dtype = field(metadata={"static": True})

    def dequantized(self) -> jax.Array:
        """The weight [*outputs, *inputs] in `dtype`; of a stack, all of them."""
        return self._dequantized(self.codes, self.scale, self.minimum)

    def dequantized_for(self, x: jax.Array) -> jax.Array:
        """The same, computed when x is there and not before: XLA would dequantize the weights of
        all layers at the beginning of a step, or before a loop, and hold all of them at once."""
        codes, _ = jax.lax.optimization_barrier((self.codes, x))
        return self._dequantized(codes, self.scale, self.minimum)

    def _dequantized(
        self, codes: jax.Array, scale: jax.Array, minimum: jax.Array | None
    ) -> jax.Array:
        if codes.dtype == jnp.uint8:
            codes = jnp.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
        values = codes.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]
        if minimum is not None:
            values = values + minimum.astype(jnp.float32)[..., None]
        # A device's part of a weight may have a part of its inputs, which is one of the first's.
        return values.astype(self.dtype).reshape(*scale.shape[:-1], -1, *self.inputs[1:])

    def apply(self, x: jax.Array, num_inputs: int = 1, out_dtype: Any | None = None) -> jax.Array:
        weight, count = self.dequantized_for(x), len(self.inputs)
        contracted = (
            tuple(range(x.ndim - count, x.ndim)),
            tuple(range(weight.ndim - count, weight.ndim)),
        )
        return dense_product(x, weight, contracted, out_dtype)

    def rows(self, ids: jax.Array) -> jax.Array:
        """Some outputs' weights [T, *inputs] in `dtype`; ids int32[T], clipped to what there is."""

        def taken(array: jax.Array) -> jax.Array:
            return jnp.take(array, ids, axis=0, mode="clip")

        minimum = None if self.minimum is None else taken(self.minimum)
        return self._dequantized(taken(self.codes), taken(self.scale), minimum)


def abstract_packed(
    kind: BlockType, outputs: tuple[int, ...], inputs: tuple[int, ...], dtype: jnp.dtype
) -> PackedWeight:
    """What `pack_blocks` makes, as `jax.ShapeDtypeStruct`s.

    Args:
        kind: of the blocks.
        outputs, inputs: the weight's dimensions.
        dtype: of the weight it stands for.
    """
    num_blocks = int(np.prod(inputs)) // kind.codes
    scale = jax.ShapeDtypeStruct((*outputs, num_blocks), kind.scale_dtype)
    minimum = None
    if kind.minimum_dtype is not None:
        minimum = jax.ShapeDtypeStruct(scale.shape, kind.minimum_dtype)
    codes_dtype = np.uint8 if kind.nibbles else np.int8
    return PackedWeight(
        codes=jax.ShapeDtypeStruct((*scale.shape, kind.code_bytes), codes_dtype),  # type: ignore[arg-type]
        scale=scale,  # type: ignore[arg-type]
        minimum=minimum,  # type: ignore[arg-type]
        inputs=inputs,
        dtype=dtype,
    )


def pack_blocks(
    blocks: Blocks, outputs: tuple[int, ...], inputs: tuple[int, ...], dtype: jnp.dtype
) -> PackedWeight:
    """A weight of NumPy arrays, of the blocks of its outputs in their order."""

    def shaped(rows: np.ndarray) -> Any:
        return rows.reshape(*outputs, *rows.shape[1:])

    return PackedWeight(
        codes=shaped(blocks.codes),
        scale=shaped(blocks.scale),
        minimum=None if blocks.minimum is None else shaped(blocks.minimum),
        inputs=inputs,
        dtype=dtype,
    )
