"""Numbers by row and column, however a checkpoint packs them.

Rows are a linear weight's outputs and columns its inputs, or blocks of them. Stacks of experts have
a dimension before both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.loading.stored.disk import Disk, read_finite
from octavo.models.tensor_layouts import Index

WORD_BITS = 32
NOT_A_NUMBER = 255
"""The exponent of a scale that makes no number of anything."""
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
E2M1 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
"""What four bits stand for: the highest is the sign, two are the exponent, one the mantissa."""
E2M1_BY_BYTE = E2M1[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)]
"""The two numbers of each byte, the one in its low half first."""


class Grid(Protocol):
    """Numbers [..., rows, columns]."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that hold them."""
        ...

    def read(self, disk: Disk, index: Index) -> np.ndarray:
        """A slice in float32."""
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers that are one tensor.

    Attributes:
        name: of the tensor.
        transposed: on disk columns come before rows.
    """

    name: str
    transposed: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, disk: Disk, index: Index) -> np.ndarray:
        *stack, rows, columns = index
        if not self.transposed:
            return disk.read(self.name, index).astype(np.float32)
        found = disk.read(self.name, (*stack, columns, rows)).astype(np.float32)
        return found.swapaxes(-1, -2)


@dataclass(frozen=True, slots=True)
class Scales:
    """Scales, which must be finite.

    Attributes:
        name: of the tensor.
        shape: [..., rows, columns], whatever dimensions of size 1 it lacks on disk.
        transposed: on disk columns come before rows.
        by: one number that all are multiplied by first, or None.
        over: one number that all are divided by first, or None.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool = False
    by: str | None = None
    over: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.name, self.by, self.over) if name is not None)

    def read(self, disk: Disk, index: Index) -> np.ndarray:
        *stack, rows, columns = index
        if self.transposed:
            found = read_finite(disk, self.name, (*stack, columns, rows)).swapaxes(-1, -2)
        elif disk.entries[self.name].shape == self.shape:
            found = read_finite(disk, self.name, index)
        else:
            found = read_finite(disk, self.name).reshape(self.shape)[index]
        if self.by is not None:
            found = found * read_finite(disk, self.by).reshape(())
        if self.over is not None:
            found = found / read_finite(disk, self.over).reshape(())
        return found


@dataclass(frozen=True, slots=True)
class PowersOfTwo:
    """Scales 2^(n - 127), a byte each; one byte stands for no number.

    Attributes:
        name: of the tensor, uint8 or F8_E8M0.
    """

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, disk: Disk, index: Index) -> np.ndarray:
        exponents = disk.read(self.name, index).view(np.uint8)
        if (exponents == NOT_A_NUMBER).any():
            raise ModelLoadError(
                f"{disk.where}: {shorten(self.name)} holds {NOT_A_NUMBER}, which is not allowed: "
                f"0 to {NOT_A_NUMBER - 1}"
            )
        return np.ldexp(np.float32(1.0), exponents.astype(np.int32) - 127)


@dataclass(frozen=True, slots=True)
class PackedFloats:
    """Numbers of four bits (E2M1), two a byte along columns, the first in its low half.

    Attributes:
        name: uint8 [..., rows, columns / 2], or [..., rows, blocks, bytes of a block].
        in_blocks: columns of a block; None where columns have one dimension.
    """

    name: str
    in_blocks: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, disk: Disk, index: Index) -> np.ndarray:
        *rest, columns = index
        # Whole blocks, or whole bytes.
        size = self.in_blocks or 2
        span = slice(columns.start // size, num_blocks(columns.stop, size))
        within = () if self.in_blocks is None else (slice(0, size // 2),)
        packed = disk.read(self.name, (*rest, span, *within))
        packed = packed.reshape(*packed.shape[: len(rest)], -1)
        numbers = E2M1_BY_BYTE[packed].reshape(*packed.shape[:-1], -1)
        first = span.start * size
        return numbers[..., columns.start - first : columns.stop - first]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedIntegers:
    """Integers of a few bits in words of 32, the first in the lowest bits.

    Attributes:
        name: int32, of which the packed dimension is shorter.
        bits: of an integer.
        along_rows: rows are packed, not columns.
        transposed: on disk columns come before rows.
        straddles: integers follow each other over the borders of words; otherwise a word holds as
            many as fit it whole.
        order: which of its neighbours each integer of a word is; None is the order of bits.
        added: to each integer, which wraps around in its bits.
        offset: taken from each then.
    """

    name: str
    bits: int
    along_rows: bool = False
    transposed: bool = False
    straddles: bool = False
    order: tuple[int, ...] | None = None
    added: int = 0
    offset: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def num_words(self, count: int) -> int:
        """Words that hold so many integers."""
        if self.straddles:
            return -(-count * self.bits // WORD_BITS)
        return -(-count // (WORD_BITS // self.bits))

    def read(self, disk: Disk, index: Index) -> np.ndarray:
        *stack, rows, columns = index
        wanted = rows if self.along_rows else columns
        # A run of integers that begins and ends with a word.
        integers, words = (WORD_BITS, self.bits) if self.straddles else (WORD_BITS // self.bits, 1)
        first, last = wanted.start // integers, -(-wanted.stop // integers)
        total = disk.entries[self.name].shape[self._packed_dim(len(index))]
        span = slice(first * words, min(last * words, total), 1)
        kept = (span, columns) if self.along_rows else (rows, span)
        found = disk.read(self.name, (*stack, *(kept[::-1] if self.transposed else kept)))
        packed = found.astype(np.int32, copy=False).view(np.uint32)
        packed = np.moveaxis(packed, self._packed_dim(len(index)), -1)
        missing = (last - first) * words - packed.shape[-1]
        if missing:
            packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, missing)])
        flat = self._unpacked(packed.reshape(*packed.shape[:-1], last - first, words))
        flat = flat[..., wanted.start - first * integers : wanted.stop - first * integers]
        # The packed dimension is last now: of columns that is where they belong.
        return flat.swapaxes(-1, -2) if self.along_rows else flat

    def _packed_dim(self, num_dims: int) -> int:
        """Of the tensor on disk, the packed dimension."""
        return num_dims - 2 if self.along_rows != self.transposed else num_dims - 1

    def _unpacked(self, words: np.ndarray) -> np.ndarray:
        """uint32 [..., runs, words] -> float32 [..., runs · integers]."""
        mask = np.uint32((1 << self.bits) - 1)
        if self.straddles:
            start = np.arange(WORD_BITS) * self.bits
            at, shift = start // WORD_BITS, (start % WORD_BITS).astype(np.uint32)
            low = words[..., at] >> shift
            # What is beyond a word is in the next one. None is beyond the last.
            over = shift + self.bits > WORD_BITS
            beyond = words[..., np.minimum(at + 1, self.bits - 1)]
            above = beyond << np.where(over, WORD_BITS - shift, 0).astype(np.uint32)
            found = np.where(over, low | above, low)
        else:
            shifts = np.arange(0, WORD_BITS - self.bits + 1, self.bits, dtype=np.uint32)
            found = words >> shifts
        if self.order is not None:
            found = found[..., np.argsort(self.order)]
        integers = ((found + np.uint32(self.added)) & mask).astype(np.float32)
        integers -= np.float32(self.offset)
        return integers.reshape(*integers.shape[:-2], -1)


def num_blocks(count: int, size: int) -> int:
    """Blocks of `size` that hold so many."""
    return -(-count // size)
