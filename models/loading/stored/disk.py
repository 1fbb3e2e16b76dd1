"""The tensors of an open checkpoint as they lie on disk, and what formats check about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.tensor_layouts import Index

FLOATS = ("F32", "F16", "BF16")
EIGHT_BITS = ("F8_E4M3",)


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor on disk.

    Attributes:
        shape: as stored.
        dtype: safetensors' name of it, such as "F8_E4M3".
        stored_as: its name on disk; it goes by the text model's name here.
    """

    shape: tuple[int, ...]
    dtype: str
    stored_as: str


class Disk(Protocol):
    """An open checkpoint.

    Attributes:
        where: it is, for messages.
        entries: its tensors, by the names that they have in the text model.
    """

    @property
    def where(self) -> str: ...

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """A slice of a tensor, or all of it, in its own dtype; it may view the file."""
        ...


def require(
    disk: Disk,
    name: str,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...] | None,
    by: str,
    *,
    num_dims: int | None = None,
    least_dims: int = 0,
    may_lack_ones: bool = False,
) -> Entry:
    """A tensor that must be there.

    Args:
        disk: the checkpoint.
        name: of the tensor.
        dtypes: allowed ones.
        shape: the only one allowed; None allows any.
        by: what says so, for messages.
        num_dims, least_dims: dimensions that it must have.
        may_lack_ones: `shape` may also lack, or have more, dimensions of size 1.

    Raises:
        ModelLoadError: it is missing, or of another dtype or shape.
    """
    entry = disk.entries.get(name)
    if entry is None:
        raise ModelLoadError(f"{disk.where} lacks {shorten(name)}, by {shorten(by)}")
    if entry.dtype not in dtypes:
        raise ModelLoadError(
            f"{disk.where}: the dtype of {shorten(name)} = {entry.dtype} is not allowed: "
            f"{' or '.join(dtypes)}, by {shorten(by)}"
        )
    wanted: object = shape
    fits = shape is None or entry.shape == shape
    if shape is not None and may_lack_ones:
        fits = [size for size in entry.shape if size != 1] == [size for size in shape if size != 1]
    if num_dims is not None or least_dims:
        fits = len(entry.shape) == num_dims or 0 < least_dims <= len(entry.shape)
        fits = fits and min(entry.shape, default=1) > 0
        wanted = f"{num_dims or least_dims} dimensions" + (" or more" if least_dims else "")
    if not fits:
        raise ModelLoadError(
            f"{disk.where}: the shape of {shorten(name)} = {entry.shape} is not allowed: {wanted}, "
            f"by {shorten(by)}"
        )
    return entry


def read_finite(disk: Disk, name: str, index: Index | None = None) -> np.ndarray:
    """Numbers of a tensor in float32; scales above all.

    Raises:
        ModelLoadError: one is infinite or no number.
    """
    numbers = disk.read(name, index).astype(np.float32)
    if not np.isfinite(numbers).all():
        bad = numbers[~np.isfinite(numbers)][0]
        raise ModelLoadError(
            f"{disk.where}: {shorten(name)} holds {bad}, which is not allowed: finite numbers"
        )
    return numbers
