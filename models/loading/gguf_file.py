"""The GGUF container: metadata and where each tensor's bytes lie.

Every length in the file is checked against the file's size, and every count against what a header
may hold, before anything is built from it. `gguf.GGUFReader`
is not used because it builds several arrays for each vocabulary entry: seconds for a file whose
header this reads in tens of milliseconds.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import MAX_SIZE, MAX_TENSORS, is_integer

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
SUPPORTED_TYPES = (
    "F32",
    "F16",
    "BF16",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "IQ4_NL",
    "IQ4_XS",
    "TQ1_0",
    "TQ2_0",
    "MXFP4",
)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**40
MAX_DEPTH = 4
MAX_HEADER_BYTES = 1 << 27
"""Longest header that is read: several times that of the largest vocabularies. A sparse file may
claim any length, and each byte of it may become an object."""
MAX_KEYS = 1 << 16
MAX_VALUES = 1 << 22
"""Most entries of all metadata arrays together: four for each token of a million."""

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """One tensor of a file.

    Attributes:
        name: as the file calls it.
        shape: row-major, so that a linear weight is [out, in].
        type: how its elements are stored.
        offset: of its first byte in the file.
        num_bytes: how many there are.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GGUFFile:
    """An open GGUF file, memory-mapped and read only.

    Attributes:
        path: the file.
        metadata: key -> number, string, bool, or list of these.
        tensors: name -> where it is.
        metadata_span: (first byte, byte after the last) of the key-value section.

    Raises (on construction):
        ModelLoadError: not a GGUF file, truncated, or with sizes that contradict each other.
        UnsupportedModelError: a tensor stored in a type that is not in `SUPPORTED_TYPES`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._bytes = np.memmap(self.path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{self.path} cannot be read: {error}") from error
        header = _Header(self.path, memoryview(self._bytes))
        num_tensors, num_keys = header.preamble()
        start = header.position
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = header.string()
            if key in self.metadata:
                raise header.damaged(f"the key {shorten(key)} appears twice")
            self.metadata[key] = header.value(header.scalar("<I"))
        self.metadata_span = (start, header.position)
        self.tensors = self._read_tensors(header, num_tensors)

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8 [rows, bytes a row]: a view of the file."""
        tensor = self.tensors[name]
        data = self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]
        return data.reshape(math.prod(tensor.shape[:-1]), -1)

    def slice(self, start: int, end: int) -> bytes:
        """Bytes start to end of the file."""
        return self._bytes[start:end].tobytes()

    def _read_tensors(self, header: _Header, count: int) -> dict[str, GGUFTensor]:
        infos = [header.tensor_info() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not is_integer(alignment, 1, MAX_SIZE) or alignment & (alignment - 1):
            raise header.damaged(f"general.alignment = {shorten(alignment)} is not a power of two")
        data_start = -(-header.position // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        total_bytes = 0
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise header.damaged(f"the tensor {shorten(name)} appears twice")
            num_bytes = _storage_bytes(header, name, shape, kind)
            end = data_start + offset + num_bytes
            if end > len(self._bytes):
                raise header.damaged(
                    f"tensor {shorten(name)} ends at byte {end}, the file at {len(self._bytes)}: "
                    "it is truncated or its sizes are wrong"
                )
            total_bytes += num_bytes
            if total_bytes > len(self._bytes):
                raise header.damaged("its tensors overlap: together they are larger than the file")
            tensors[name] = GGUFTensor(
                name=name, shape=shape, type=kind, offset=data_start + offset, num_bytes=num_bytes
            )
        return tensors


def write_metadata_only(file: GGUFFile, destination: Path) -> None:
    """Write a GGUF file with all of `file`'s metadata and none of its tensors."""
    start, end = file.metadata_span
    header = MAGIC + struct.pack("<IQQ", SUPPORTED_VERSIONS[-1], 0, len(file.metadata))
    destination.write_bytes(header + file.slice(start, end))


class _Header:
    """A cursor over the file that refuses to read past its end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.position = 0
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.num_values = 0

    def damaged(self, why: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is not a sound GGUF file: {why}")

    def preamble(self) -> tuple[int, int]:
        if bytes(self.take(4)) != MAGIC:
            raise self.damaged("it does not begin with GGUF")
        version = self.scalar("<I")
        if version not in SUPPORTED_VERSIONS:
            raise self.damaged(
                f"version = {version} is not allowed: {' or '.join(map(str, SUPPORTED_VERSIONS))}"
            )
        num_tensors, num_keys = self.scalar("<Q"), self.scalar("<Q")
        self.check_count("tensor count", num_tensors, MAX_TENSORS)
        self.check_count("key count", num_keys, MAX_KEYS)
        return num_tensors, num_keys

    def check_count(self, what: str, count: int, high: int) -> None:
        """Refuse a count that the file is too short for, or that no checkpoint needs."""
        if count > len(self.data):
            raise self.damaged(f"{what} = {count} is more than the file has bytes")
        if count > high:
            raise self.damaged(f"{what} = {count} is not allowed: at most {high}")

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if end > self.end:
            limit = "the file ends" if self.end == len(self.data) else "no header goes on"
            raise self.damaged(
                f"its header wants {size} bytes at {self.position}, {limit} at "
                f"{self.end}: it is truncated or its sizes are wrong"
            )
        taken = self.data[self.position : end]
        self.position = end
        return taken

    def scalar(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def string(self) -> str:
        size = self.scalar("<Q")
        return bytes(self.take(size)).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY and depth < MAX_DEPTH:
            return self._array(depth)
        raise self.damaged(f"a value of the unknown type {kind}")

    def _array(self, depth: int) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        self.num_values += count
        self.check_count("entries of arrays", self.num_values, MAX_VALUES)
        if kind in _SCALARS:
            layout = _SCALARS[kind]
            data = self.take(count * struct.calcsize(layout))
            dtype = "?" if layout == "<?" else layout.replace("b", "i1").replace("B", "u1")
            numbers: list[Any] = np.frombuffer(data, dtype=np.dtype(dtype)).tolist()
            return numbers
        return [self.value(kind, depth + 1) for _ in range(count)]

    def tensor_info(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self.string()
        num_dims = self.scalar("<I")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise self.damaged(f"tensor {shorten(name)} has {num_dims} dimensions, not 1 to 4")
        shape = tuple(self.scalar("<Q") for _ in range(num_dims))[::-1]
        if min(shape) < 1 or math.prod(shape) > MAX_ELEMENTS:
            raise self.damaged(f"tensor {shorten(name)} has the impossible shape {shape}")
        number, offset = self.scalar("<I"), self.scalar("<Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self.damaged(f"tensor {shorten(name)} has the unknown type {number}") from None
        return name, shape, kind, offset


def _storage_bytes(
    header: _Header, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> int:
    if kind.name not in SUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"{header.path}: tensor {shorten(name)} is stored as {kind.name}, "
            f"which is not supported: {', '.join(SUPPORTED_TYPES)}"
        )
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_elements:
        raise header.damaged(
            f"tensor {shorten(name)} of {kind.name} has rows of {shape[-1]} elements, "
            f"not a multiple of {block_elements}"
        )
    return math.prod(shape) // block_elements * block_bytes
