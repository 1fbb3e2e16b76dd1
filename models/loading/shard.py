"""One safetensors file, memory-mapped."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from octavo.engine.errors import ModelLoadError
from octavo.models.tensor_layouts import Index

MAX_HEADER_BYTES = 1 << 24
"""Longest header that is parsed: 256 bytes for each of 65,536 tensors."""
_LENGTH = struct.Struct("<Q")
_OF_EIGHT_BITS: Final[dict[str, Any]] = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": np.uint8,
}
"""What NumPy, and so the library, has no numbers for."""


class Shard:
    """A file whose header is sound.

    Attributes:
        path: of it.
        entries: shape and dtype of each tensor, as safetensors names it.

    Raises (on construction):
        ModelLoadError: it is damaged, or its header longer than `MAX_HEADER_BYTES`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header_bytes = _check_header_length(path)
        try:
            self._file = safe_open(path, framework="np")
            names = list(self._file.keys())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is not a sound safetensors file: {error}") from error
        self.entries: dict[str, tuple[tuple[int, ...], str]] = {}
        for name in names:
            view = self._file.get_slice(name)
            self.entries[name] = tuple(view.get_shape()), view.get_dtype()
        self._header_bytes = header_bytes

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """A slice of a tensor, or all of it; it may view the file."""
        shape, dtype = self.entries[name]
        if dtype in _OF_EIGHT_BITS:
            whole = self.raw(name).reshape(shape).view(_OF_EIGHT_BITS[dtype])
            return np.asarray(whole if index is None else whole[index])
        if index is None or not shape:
            tensor: np.ndarray = self._file.get_tensor(name)
            return tensor
        part: np.ndarray = self._file.get_slice(name)[index]
        return part

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8: a view of the file."""
        header, content = self._content
        first, last = header[name]["data_offsets"]
        return content[first:last]

    @cached_property
    def _content(self) -> tuple[dict[str, Any], np.ndarray]:
        """The header, and all that comes behind it."""
        # The library has found the header sound: offsets are within the file and fit shapes.
        with self.path.open("rb") as file:
            file.seek(_LENGTH.size)
            header: dict[str, Any] = json.loads(file.read(self._header_bytes))
        start = _LENGTH.size + self._header_bytes
        return header, np.memmap(self.path, np.uint8, mode="r", offset=start)


def write_shard(path: Path, shard: Shard, names: Iterable[str]) -> None:
    """Write a file of some tensors of another, byte for byte.

    Args:
        path: of the new file.
        shard: the other one.
        names: of the tensors.
    """
    # Wide numbers first, as the library has it: each tensor then starts at a multiple of its own.
    ordered = sorted(names, key=lambda name: -_item_bytes(shard.entries[name], shard.raw(name)))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in ordered:
        (shape, dtype), start = shard.entries[name], end
        end += len(shard.raw(name))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH.size)
    with path.open("wb") as file:
        file.write(_LENGTH.pack(len(text)) + text)
        for name in ordered:
            file.write(shard.raw(name).data)


def _item_bytes(entry: tuple[tuple[int, ...], str], raw: np.ndarray) -> int:
    return len(raw) // max(1, math.prod(entry[0]))


def _check_header_length(path: Path) -> int:
    """Bytes of a header; one that is too long to be parsed is refused, the library refuses other
    lies."""
    try:
        with path.open("rb") as file:
            start = file.read(_LENGTH.size)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    length: int = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
    if MAX_HEADER_BYTES < length < path.stat().st_size:
        raise ModelLoadError(
            f"{path} is not a sound safetensors file: its header is longer than "
            f"{MAX_HEADER_BYTES} bytes"
        )
    return length
