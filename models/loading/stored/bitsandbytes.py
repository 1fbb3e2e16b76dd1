"""`quant_method: bitsandbytes`: four bits that a table explains, or eight with a scale an output.

Four bits: `NAME.weight` uint8 [n / 2, 1] holds two codes a byte, the first in its high half, of all
numbers of a weight one row after the other; `NAME.weight.quant_map` float32[16] is what codes stand
for, `NAME.weight.absmax` the scale of each block of them. Quantized twice, absmax is uint8: by a
table of its own (`nested_quant_map`, float32[256]), with scales of its own (`nested_absmax`) and a
number added. `NAME.weight.quant_state.bitsandbytes__nf4` (or fp4) is JSON that has the sizes.

Eight bits: `NAME.weight` int8 [outputs, inputs], whose rows `NAME.SCB` / 127 scales.

Source: Dettmers et al., QLoRA, arXiv 2305.14314; LLM.int8(), arXiv 2208.07339.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.checks import MAX_SIZE
from octavo.models.families.config_fields import ConfigFields
from octavo.models.loading.stored.disk import FLOATS, Disk, read_finite, require
from octavo.models.loading.stored.grids import Plain, Scales
from octavo.models.loading.stored.tensor import Affine, Format, Found
from octavo.models.tensor_layouts import Index

STATE = ".quant_state.bitsandbytes__"
CODES = ("nf4", "fp4")
OF_EIGHT_BITS = ".SCB"
LARGEST_STATE = 4096
"""Bytes of JSON."""
LARGEST = 1.0 / 127.0
"""What the largest number of eight bits is divided by, as bitsandbytes writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """Scales that are quantized themselves.

    Attributes:
        block_size: of them share a scale.
        offset: added to each.
    """

    block_size: int
    offset: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TableCoded:
    """Numbers that four bits choose from a table, times the scale of their block.

    Attributes:
        name: of the tensor.
        shape: [rows, columns], which blocks know nothing of.
        block_size: numbers that share a scale.
        nested: how scales are stored; None for plain numbers.
        state: the name of the JSON.
    """

    name: str
    shape: tuple[int, int]
    block_size: int
    nested: Nested | None
    state: str

    @property
    def names(self) -> tuple[str, ...]:
        nested = ("nested_absmax", "nested_quant_map") if self.nested is not None else ()
        parts = ("absmax", "quant_map", *nested)
        return (self.name, self.state, *(f"{self.name}.{part}" for part in parts))

    def read(self, disk: Disk, index: Index) -> np.ndarray:
        rows, columns = index
        first, last = rows.start * self.shape[1], rows.stop * self.shape[1]
        begin = first // 2
        packed = disk.read(self.name, (slice(begin, -(-last // 2)), slice(0, 1)))[:, 0]
        codes = np.stack([packed >> np.uint8(4), packed & np.uint8(15)], axis=-1).reshape(-1)
        table = read_finite(disk, f"{self.name}.quant_map")
        found = table[codes[first - 2 * begin : last - 2 * begin]]
        block = first // self.block_size
        scales = self._scales(disk, block, -(-last // self.block_size))
        found *= scales[np.arange(first, last) // self.block_size - block]
        return found.reshape(-1, self.shape[1])[:, columns]

    def _scales(self, disk: Disk, first: int, last: int) -> np.ndarray:
        if self.nested is None:
            return read_finite(disk, f"{self.name}.absmax", (slice(first, last),))
        codes = disk.read(f"{self.name}.absmax", (slice(first, last),))
        table = read_finite(disk, f"{self.name}.nested_quant_map")
        scales = read_finite(disk, f"{self.name}.nested_absmax")
        of_codes = scales[np.arange(first, last) // self.nested.block_size]
        return table[codes] * of_codes + np.float32(self.nested.offset)


def read(fields: ConfigFields) -> Format:
    """The format; which weights have it, and in how many bits, their tensors say."""
    del fields
    return find


def find(disk: Disk, expected: Collection[str]) -> Found:
    """See `Format`."""
    del expected
    found = Found(unused={name for name in disk.entries if name.endswith(".weight_format")})
    for name in disk.entries:
        if STATE in name:
            weight, _, code = name.partition(STATE)
            if code not in CODES:
                raise ModelLoadError(
                    f"{disk.where} holds {shorten(name)}, whose kind {shorten(code)} is not "
                    f"allowed: {' or '.join(CODES)}"
                )
            found.add(disk, weight, _table_coded(disk, weight, name))
        elif name.endswith(OF_EIGHT_BITS):
            module = name.removesuffix(OF_EIGHT_BITS)
            found.add(disk, f"{module}.weight", _of_eight_bits(disk, f"{module}.weight", name))
    return found


def _of_eight_bits(disk: Disk, weight: str, scales: str) -> Affine:
    shape = require(disk, weight, ("I8",), None, scales, num_dims=2).shape
    require(disk, scales, ("F32",), (shape[0],), weight)
    rows = (shape[0], 1)
    return Affine(
        shape=shape,
        numbers=Plain(weight),
        block=(1, shape[1]),
        scales=Scales(scales, rows),
        factor=LARGEST,
    )


def _table_coded(disk: Disk, name: str, state: str) -> TableCoded:
    if math.prod(require(disk, state, ("U8",), None, name, num_dims=1).shape) > LARGEST_STATE:
        raise ModelLoadError(f"{disk.where}: {shorten(state)} is longer than {LARGEST_STATE} bytes")
    fields = ConfigFields(_state(disk, state), f"{disk.where}: {shorten(state)}")
    sizes = fields.numbers("shape")
    if len(sizes) != 2 or not all(size.is_integer() and 1 <= size <= MAX_SIZE for size in sizes):
        raise ModelLoadError(f"{fields.where}: shape = {shorten(sizes)} is not allowed: two sizes")
    rows, columns = (int(size) for size in sizes)
    block_size = fields.size("blocksize")
    num_scales = -(-rows * columns // block_size)
    require(disk, name, ("U8",), (-(-rows * columns // 2), 1), state)
    require(disk, f"{name}.quant_map", ("F32",), (16,), state)
    nested = None
    if f"{name}.nested_absmax" in disk.entries:
        nested = Nested(
            block_size=fields.size("nested_blocksize"), offset=fields.number("nested_offset")
        )
        require(disk, f"{name}.nested_quant_map", ("F32",), (256,), state)
        of_scales = (-(-num_scales // nested.block_size),)
        require(disk, f"{name}.nested_absmax", ("F32",), of_scales, state)
    dtypes = FLOATS if nested is None else ("U8",)
    require(disk, f"{name}.absmax", dtypes, (num_scales,), state)
    return TableCoded(
        name=name, shape=(rows, columns), block_size=block_size, nested=nested, state=state
    )


def _state(disk: Disk, name: str) -> dict[str, Any]:
    try:
        found = json.loads(disk.read(name).tobytes())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelLoadError(f"{disk.where}: {shorten(name)} is no JSON object")
    return found
