"""Tensors that others on disk stand for."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.loading.stored.disk import Disk, require
from octavo.models.loading.stored.grids import Grid
from octavo.models.tensor_layouts import Index


class StoredTensor(Protocol):
    """A tensor of the model, as a format has it on disk.

    Attributes:
        shape: of the numbers.
        names: the tensors on disk that stand for it.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def read(self, disk: Disk, index: Index) -> np.ndarray:
        """A slice in float32.

        Raises:
            ModelLoadError: something that stands for no number.
        """
        ...


@dataclass(slots=True)
class Found:
    """What a format makes of a checkpoint.

    Attributes:
        tensors: by the model's names.
        unused: tensors on disk that say nothing about weights, such as scales of activations.
    """

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)

    def add(self, disk: Disk, name: str, tensor: StoredTensor) -> None:
        """Takes a tensor in.

        Raises:
            ModelLoadError: it is on disk under its own name, too.
        """
        if name in disk.entries and name not in tensor.names:
            raise ModelLoadError(
                f"{disk.where} holds {shorten(name)} twice, as {shorten(tensor.names[0])} too"
            )
        self.tensors[name] = tensor


Format = Callable[[Disk, Collection[str]], Found]
"""From an open checkpoint and the names that its model wants to what stands for them.

Raises:
    ModelLoadError: a part is missing, or has another dtype or shape than the rest wants.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """(number - zero) · scale, in float32.

    Attributes:
        shape: [..., rows, columns].
        numbers: as stored.
        block: rows and columns that share a scale and a zero.
        scales, zeros: by block; without zeros they are 0.
        groups: int32 [columns], which block of columns each is in; None if they follow each other.
        turned: in the model columns come before rows; `shape` is the model's.
        factor: multiplies all in the end.
    """

    shape: tuple[int, ...]
    numbers: Grid
    block: tuple[int, int]
    scales: Grid
    zeros: Grid | None = None
    groups: str | None = None
    turned: bool = False
    factor: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        zeros = () if self.zeros is None else self.zeros.names
        groups = () if self.groups is None else (self.groups,)
        return (*self.numbers.names, *self.scales.names, *zeros, *groups)

    def read(self, disk: Disk, index: Index) -> np.ndarray:
        *stack, rows, columns = index
        if self.turned:
            rows, columns = columns, rows
        found = self.numbers.read(disk, (*stack, rows, columns))
        of_rows, row_ids = _blocks(rows, self.block[0])
        if self.groups is None:
            of_columns, column_ids = _blocks(columns, self.block[1])
        else:
            of_columns, column_ids = self._grouped(disk, columns)

        def spread(grid: Grid) -> np.ndarray:
            values = grid.read(disk, (*stack, of_rows, of_columns))
            for axis, ids in ((-2, row_ids), (-1, column_ids)):
                values = values if ids is None else values.take(ids, axis)
            return values

        if self.zeros is not None:
            found = found - spread(self.zeros)
        with np.errstate(over="ignore"):
            found = found * spread(self.scales)
        if self.factor != 1.0:
            found *= np.float32(self.factor)
        return found.swapaxes(-1, -2) if self.turned else found

    def spread(self, disk: Disk, grid: Grid, size: int) -> np.ndarray:
        """Scales or zeros [rows, columns / size] of runs of columns, each within a block."""
        rows, columns = self.shape
        runs = columns // size
        values = grid.read(
            disk, (slice(0, -(-rows // self.block[0])), slice(0, -(-columns // self.block[1])))
        )
        values = values.repeat(self.block[0], 0)[:rows]
        return values.take(np.arange(runs) * size // self.block[1], axis=1)

    def _grouped(self, disk: Disk, columns: slice) -> tuple[slice, np.ndarray]:
        assert self.groups is not None
        num_groups = -(-self.shape[-2 if self.turned else -1] // self.block[1])
        ids = disk.read(self.groups, (columns,))
        if ids.size and not (ids.min() >= 0 and ids.max() < num_groups):
            bad = ids[(ids < 0) | (ids >= num_groups)][0]
            raise ModelLoadError(
                f"{disk.where}: {shorten(self.groups)} holds {bad}, which is not allowed: "
                f"0 to {num_groups - 1}"
            )
        return slice(0, num_groups), ids


def read_groups(disk: Disk, name: str, columns: int, size: int, by: str) -> str | None:
    """The tensor that says which group each input is in; None if it is not there, or if groups
    follow each other anyway.

    Args:
        disk: the checkpoint.
        name: of the tensor.
        columns, size: inputs, and those of a group.
        by: the weight, for messages.

    Raises:
        ModelLoadError: another dtype or shape.
    """
    if name not in disk.entries:
        return None
    require(disk, name, ("I32",), (columns,), by)
    return None if np.array_equal(disk.read(name), np.arange(columns) // size) else name


def _blocks(part: slice, size: int) -> tuple[slice, np.ndarray | None]:
    """Which blocks hold a slice, and which of these each of its places is in; None where the block
    is one, or each place one of its own."""
    first, last = part.start // size, -(-part.stop // size)
    if size == 1 or last - first <= 1:
        return slice(first, last), None
    return slice(first, last), np.arange(part.start, part.stop) // size - first
