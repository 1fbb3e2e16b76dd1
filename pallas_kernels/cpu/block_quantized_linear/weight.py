"""A weight as a block-quantized checkpoint holds it: small codes, and what they stand for by block.

Shape suffixes: N outputs, K inputs, B blocks of an output's inputs, C codes a block, H bytes that
hold them (C / 2 where a byte holds two), and a tile's T outputs, `LANES` side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from octavo.pallas_kernels.cpu.block_quantized_linear.kernel import (
    LANES,
    PANEL,
    block_quantized_linear,
)
from octavo.pallas_kernels.linear_weight import LinearWeight
from octavo.pallas_kernels.stored_blocks import Blocks, BlockType

TILE_OUTPUTS = 8192
"""Most outputs computed together: their float32 sums stay in a core's first cache."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockQuantizedWeight(LinearWeight):
    """weight = code · scale + minimum, in float32, laid out so that a product reads it in order.

    Outputs are filled up with zeros to whole tiles.

    Attributes:
        codes: uint8 (nibbles) or int8 [tiles, B, T / LANES, H, LANES].
        scale: float16 or float32 [tiles, B, T / LANES, LANES].
        minimum: the same, or None.
        outputs: the outputs' dimensions, static.
        first_tile: where its tiles begin, int32, if the arrays hold those of a whole stack; None if
            they are all its own.
    """

    codes: jax.Array
    scale: jax.Array
    minimum: jax.Array | None
    outputs: tuple[int, ...] = field(metadata={"static": True})
    first_tile: jax.Array | None = None
    is_in_panels: ClassVar[bool] = False

    @property
    def is_stack(self) -> bool:
        """Whether its arrays have a dimension before their own: which of several weights it is."""
        return self.codes.ndim > 5

    @property
    def num_tiles(self) -> int:
        """Tiles of its outputs."""
        return _num_tiles(self.outputs)

    def of_stack(self, number: jax.Array) -> BlockQuantizedWeight:
        """Nothing is copied: a product reads one of the stack's weights where it lies."""

        def end_to_end(array: jax.Array) -> jax.Array:
            return array.reshape(-1, *array.shape[2:])

        return BlockQuantizedWeight(
            codes=end_to_end(self.codes),
            scale=end_to_end(self.scale),
            minimum=None if self.minimum is None else end_to_end(self.minimum),
            outputs=self.outputs,
            first_tile=number * self.num_tiles,
        )

    def apply(self, x: jax.Array, num_inputs: int = 1, out_dtype: Any | None = None) -> jax.Array:
        return block_quantized_linear(x, self).astype(x.dtype if out_dtype is None else out_dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PanelWeight(LinearWeight):
    """The same numbers laid out for products of several rows, panel by panel of `PANEL` outputs.

    Attributes:
        codes: uint8 (nibbles) or int8 [panels, B, H, PANEL].
        scale: float16 or float32 [panels, B, PANEL].
        minimum: the same, or None.
        outputs: the outputs' dimensions, static.
    """

    codes: jax.Array
    scale: jax.Array
    minimum: jax.Array | None
    outputs: tuple[int, ...] = field(metadata={"static": True})
    is_in_panels: ClassVar[bool] = True

    def apply(self, x: jax.Array, num_inputs: int = 1, out_dtype: Any | None = None) -> jax.Array:
        return block_quantized_linear(x, self).astype(x.dtype if out_dtype is None else out_dtype)


def make_panels(weight: BlockQuantizedWeight) -> PanelWeight:
    """The same weight in panels; can be traced."""
    num_panels = -(-math.prod(weight.outputs) // PANEL)

    def lay(array: jax.Array) -> jax.Array:
        # [tiles, B, groups, ..., LANES] -> [outputs, B, ...]
        by_output = jnp.moveaxis(array, (2, -1), (1, 2))
        by_output = by_output.reshape(-1, *by_output.shape[3:])[: num_panels * PANEL]
        missing = num_panels * PANEL - len(by_output)
        by_output = jnp.pad(by_output, ((0, missing), *[(0, 0)] * (by_output.ndim - 1)))
        in_panels = by_output.reshape(num_panels, PANEL, *by_output.shape[1:])
        return jnp.moveaxis(in_panels, 1, -1)

    return PanelWeight(
        codes=lay(weight.codes),
        scale=lay(weight.scale),
        minimum=None if weight.minimum is None else lay(weight.minimum),
        outputs=weight.outputs,
    )


def lay_out_blocks(
    blocks: Blocks,
    outputs: tuple[int, ...],
    empty: Callable[[Sequence[int], Any], np.ndarray] = np.empty,
) -> BlockQuantizedWeight:
    """Lays blocks out for a product, as NumPy arrays.

    Args:
        blocks: of the outputs, in their order.
        outputs: their dimensions.
        empty: makes an uninitialized array from a shape and a dtype.
    """
    abstract = abstract_block_quantized(blocks.type, outputs, blocks.scale.shape[1])

    def lay(rows: np.ndarray, wanted: Any) -> Any:
        tiles, num_blocks, groups = wanted.shape[:3]
        missing = tiles * groups * LANES - len(rows)
        if missing:
            rows = np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
        rows = rows.reshape(tiles, groups, LANES, num_blocks, *rows.shape[2:])
        laid: np.ndarray = empty(wanted.shape, wanted.dtype)
        laid[...] = np.moveaxis(rows, (3, 2), (1, -1))
        return laid

    return BlockQuantizedWeight(
        codes=lay(blocks.codes, abstract.codes),
        scale=lay(blocks.scale, abstract.scale),
        minimum=None if blocks.minimum is None else lay(blocks.minimum, abstract.minimum),
        outputs=outputs,
    )


def abstract_block_quantized(
    kind: BlockType, outputs: tuple[int, ...], num_blocks: int
) -> BlockQuantizedWeight:
    """What `lay_out_blocks` makes, as `jax.ShapeDtypeStruct`s.

    Args:
        kind: of the blocks.
        outputs: the outputs' dimensions.
        num_blocks: B, of each output.
    """
    num_outputs, tiles = math.prod(outputs), _num_tiles(outputs)
    groups = -(-num_outputs // (tiles * LANES))
    scale = jax.ShapeDtypeStruct((tiles, num_blocks, groups, LANES), kind.scale_dtype)
    minimum = None
    if kind.minimum_dtype is not None:
        minimum = jax.ShapeDtypeStruct(scale.shape, kind.minimum_dtype)
    codes = jax.ShapeDtypeStruct(
        (tiles, num_blocks, groups, kind.code_bytes, LANES), np.uint8 if kind.nibbles else np.int8
    )
    return BlockQuantizedWeight(
        codes=codes,  # type: ignore[arg-type]
        scale=scale,  # type: ignore[arg-type]
        minimum=minimum,  # type: ignore[arg-type]
        outputs=outputs,
    )


def _num_tiles(outputs: tuple[int, ...]) -> int:
    return -(-math.prod(outputs) // TILE_OUTPUTS)
