"""Quantized tensors as blocks of small codes, for products that read them so.

(number - zero) · scale becomes code · scale + minimum, the same number in float32: scales of 16
bits times codes of at most 8 are exact there, and so is the difference of two such products. Under
scales of 32 bits only codes without a minimum are; those round once, as the numbers themselves do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.models.loading.stored.disk import Disk
from octavo.models.loading.stored.grids import PackedFloats, PackedIntegers, Plain, Scales
from octavo.models.loading.stored.tensor import Affine, StoredTensor
from octavo.pallas_kernels.stored_blocks import Blocks, BlockType

SIZES = (32, 16)
"""Codes that a block may have."""
NIBBLE_BITS = 4
_F16, _F32 = np.dtype(np.float16), np.dtype(np.float32)


class _Codes(NamedTuple):
    """How codes follow from numbers: code = number · times + added.

    Attributes:
        nibbles: they are 0 to 15; else -128 to 127.
    """

    nibbles: bool
    times: int = 1
    added: int = 0


def block_type(disk: Disk, tensor: StoredTensor) -> BlockType | None:
    """How a tensor's blocks are held; None if it has none.

    Blocks hold integers or four-bit floats of two dimensions, whose groups of inputs follow each
    other and are multiples of a block.
    """
    if not isinstance(tensor, Affine) or tensor.turned or tensor.groups is not None:
        return None
    codes = _codes_of(disk, tensor)
    sizes = [size for size in SIZES if tensor.block[1] % size == 0 == tensor.shape[-1] % size]
    if codes is None or not sizes or len(tensor.shape) != 2 or tensor.factor != 1.0:
        return None
    is_f16 = _scale_dtype(disk, tensor) == "F16"
    has_minimum = codes.nibbles or tensor.zeros is not None
    return BlockType(
        codes=sizes[0],
        nibbles=codes.nibbles,
        scale_dtype=_F16 if is_f16 else _F32,
        minimum_dtype=_F32 if has_minimum else None,
    )


def read_blocks(disk: Disk, tensor: StoredTensor) -> Blocks:
    """All of a tensor that has blocks; what they stand for is what `read` reads, but for the sign
    of zeros.

    Raises:
        ModelLoadError: as for `StoredTensor.read`.
    """
    kind = block_type(disk, tensor)
    assert kind is not None
    assert isinstance(tensor, Affine)
    codes = _codes_of(disk, tensor)
    assert codes is not None
    rows, columns = tensor.shape
    whole = (slice(0, rows), slice(0, columns))
    numbers = (tensor.numbers.read(disk, whole) * codes.times + codes.added).astype(np.int8)
    by_block = numbers.reshape(rows, -1, kind.codes)
    if kind.nibbles:
        low, high = np.split(by_block.view(np.uint8), 2, axis=-1)
        by_block = low | (high << np.uint8(NIBBLE_BITS))

    scale = tensor.spread(disk, tensor.scales, kind.codes) / np.float32(codes.times)
    minimum = None
    if kind.minimum_dtype is not None:
        zeros = np.full_like(scale, codes.added)
        if tensor.zeros is not None:
            zeros += tensor.spread(disk, tensor.zeros, kind.codes)
        minimum = np.ascontiguousarray(-zeros * scale)
    return Blocks(
        type=kind,
        codes=by_block,
        scale=np.ascontiguousarray(scale.astype(kind.scale_dtype)),
        minimum=minimum,
    )


def _codes_of(disk: Disk, tensor: Affine) -> _Codes | None:
    numbers = tensor.numbers
    is_exact = _scale_dtype(disk, tensor) in ("F16", "BF16")
    if tensor.zeros is not None and not is_exact:
        return None
    if isinstance(numbers, PackedFloats):
        return _Codes(nibbles=False, times=2) if tensor.zeros is None else None
    if isinstance(numbers, PackedIntegers):
        if numbers.bits <= NIBBLE_BITS and is_exact:
            return _Codes(nibbles=True, added=numbers.offset)
        holds = numbers.offset or numbers.bits < 8  # of eight bits, 0 to 255 fit no int8
        return _Codes(nibbles=False) if holds else _Codes(nibbles=False, added=-128)
    if isinstance(numbers, Plain) and disk.entries[numbers.name].dtype == "I8":
        return _Codes(nibbles=False)
    return None


def _scale_dtype(disk: Disk, tensor: Affine) -> str:
    """Of scales on disk; of those that are a product of several tensors, "F32"."""
    scales = tensor.scales
    is_plain = isinstance(scales, Scales) and scales.by is None and scales.over is None
    return disk.entries[scales.name].dtype if is_plain and isinstance(scales, Scales) else "F32"
