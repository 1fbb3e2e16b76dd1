"""Blocks of small codes with a scale each, as quantized checkpoints store weights: on the host.

Shape suffixes: N outputs, K inputs, B blocks of an output's inputs, C codes a block, and H bytes
that hold them (C / 2 where a byte holds two).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """How a tensor's blocks are held.

    Attributes:
        codes: C, consecutive inputs of an output that share a scale.
        nibbles: two codes a byte: code i in the low half of byte i, code i + C / 2 in its high
            half, 0 to 15; else one code a byte, -128 to 127.
        scale_dtype: float16 where that is what a checkpoint holds, else float32.
        minimum_dtype: likewise; None if blocks have no minimum.
    """

    codes: int
    nibbles: bool
    scale_dtype: np.dtype
    minimum_dtype: np.dtype | None

    @property
    def code_bytes(self) -> int:
        """H."""
        return self.codes // 2 if self.nibbles else self.codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Rows of a tensor, [N, K], on the host.

    Attributes:
        type: how they are held.
        codes: uint8 (nibbles) or int8 [N, B, H].
        scale: [N, B].
        minimum: [N, B], or None.
    """

    type: BlockType
    codes: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None

    def dequantized(self) -> np.ndarray:
        """float32 [N, K]: code · scale + minimum."""
        codes = self.codes
        if self.type.nibbles:
            codes = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
        values = codes.astype(np.float32) * self.scale.astype(np.float32)[..., None]
        if self.minimum is not None:
            values += self.minimum.astype(np.float32)[..., None]
        return values.reshape(len(values), -1)

    def held_as(self, wanted: BlockType) -> Blocks:
        """The same numbers in another type, one that `common_type` gave for this one among others.

        A number that is zero may change its sign.
        """
        codes, scale, minimum = self.codes, self.scale, self.minimum
        if self.type.nibbles and not wanted.nibbles:
            codes = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
            codes = codes.view(np.int8)
        if wanted.codes != self.type.codes:
            times = self.type.codes // wanted.codes
            codes = codes.reshape(len(codes), -1, wanted.codes)
            scale = np.repeat(scale, times, axis=1)
            minimum = None if minimum is None else np.repeat(minimum, times, axis=1)
        if wanted.minimum_dtype is not None:
            minimum = np.zeros_like(scale) if minimum is None else minimum
            minimum = minimum.astype(wanted.minimum_dtype, copy=False)
        scale = scale.astype(wanted.scale_dtype, copy=False)
        return Blocks(type=wanted, codes=codes, scale=scale, minimum=minimum)


def common_type(types: Sequence[BlockType]) -> BlockType:
    """One that can hold the numbers of all `types`."""
    codes = min(each.codes for each in types)
    minima = [each.minimum_dtype for each in types if each.minimum_dtype is not None]
    return BlockType(
        codes=codes,
        nibbles=all(each.nibbles and each.codes == codes for each in types),
        scale_dtype=max((each.scale_dtype for each in types), key=lambda dtype: dtype.itemsize),
        minimum_dtype=max(minima, key=lambda dtype: dtype.itemsize) if minima else None,
    )
