"""Tensors stored in MXFP4: blocks of 32 four-bit numbers that share a power of two.

`NAME_blocks` uint8 [X, rows, B, 16] holds two numbers a byte, the first in its low half;
`NAME_scales` uint8 [X, rows, B] holds each block's exponent, and 127 more. Together they stand for
NAME [X, B · 32, rows]: of a weight, inputs before outputs.

Source: OCP Microscaling Formats (MX) Specification 1.0 (2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from octavo.engine.errors import ModelLoadError
from octavo.models.tensor_layouts import Index

BLOCKS, SCALES = "_blocks", "_scales"
SUFFIXES = (BLOCKS, SCALES)
"""How the names of both parts end."""
_BLOCK = 32
_BIAS = 127
_NOT_A_NUMBER = 255
"""A scale that makes no number of anything."""
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_NUMBERS = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""What four bits stand for: the highest is the sign, two are the exponent, one the mantissa."""
_BY_BYTE = _NUMBERS[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor whose blocks and scales are stored.

    Attributes:
        blocks, scales: names on disk.
        shape: of what they stand for.
    """

    blocks: str
    scales: str
    shape: tuple[int, ...]


def packed_tensors(stored: Mapping[str, tuple[int, ...]], where: str) -> dict[str, PackedTensor]:
    """The tensors, by name, of which there are blocks.

    Args:
        stored: shapes by name.
        where: the checkpoint, for messages.

    Raises:
        ModelLoadError: blocks without their scales, or of shapes that do not fit.
    """
    found = {}
    for blocks, shape in stored.items():
        if not blocks.endswith(BLOCKS):
            continue
        name = blocks.removesuffix(BLOCKS)
        scales = name + SCALES
        if scales not in stored:
            raise ModelLoadError(f"{where} lacks {scales}")
        if name in stored:
            raise ModelLoadError(f"{where} holds {name!r} twice, as {blocks!r} too")
        if len(shape) != 4 or shape[-1] != _BLOCK // 2:
            raise ModelLoadError(
                f"{where}: the shape of {blocks} = {shape} is not allowed: four dimensions, the "
                f"last of {_BLOCK // 2}"
            )
        if stored[scales] != shape[:-1]:
            raise ModelLoadError(
                f"{where}: the shape of {scales} = {stored[scales]} is not allowed: {shape[:-1]}, "
                f"by {blocks}"
            )
        experts, rows, num_blocks, _ = shape
        found[name] = PackedTensor(blocks, scales, (experts, num_blocks * _BLOCK, rows))
    return found


def blocks_of(index: Index) -> tuple[Index, Index]:
    """Which blocks hold a slice, and what of their numbers the slice is, before it is turned."""
    experts, inputs, rows = index
    first, last = inputs.start // _BLOCK, -(-inputs.stop // _BLOCK)
    within = slice(inputs.start - first * _BLOCK, inputs.stop - first * _BLOCK)
    return (experts, rows, slice(first, last)), (slice(None), slice(None), within)


def dequantized(blocks: np.ndarray, scales: np.ndarray, name: str) -> np.ndarray:
    """The numbers, exactly.

    Args:
        blocks: uint8 [..., B, 16].
        scales: uint8 [..., B].
        name: of the tensor, for messages.

    Returns:
        float32 [..., B · 32].

    Raises:
        ModelLoadError: a scale that stands for no number.
    """
    if (scales == _NOT_A_NUMBER).any():
        raise ModelLoadError(
            f"{name}{SCALES} holds {_NOT_A_NUMBER}, which is not allowed: 0 to {_NOT_A_NUMBER - 1}"
        )
    numbers = _BY_BYTE[blocks].reshape(*blocks.shape[:-1], _BLOCK)
    exponents = scales.astype(np.int32) - _BIAS
    with np.errstate(over="ignore"):  # three of them do not fit float32, under the largest scale
        scaled = np.ldexp(numbers, exponents[..., None])
    return scaled.reshape(*blocks.shape[:-2], -1)
