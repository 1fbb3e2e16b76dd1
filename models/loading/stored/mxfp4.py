"""`quant_method: mxfp4`: experts in blocks of 32 four-bit numbers that share a power of two.

`NAME_blocks` uint8 [X, rows, B, 16] holds two numbers a byte, the first in its low half;
`NAME_scales` uint8 [X, rows, B] holds each block's exponent, and 127 more. Together they stand for
NAME [X, B · 32, rows]: of a weight, inputs before outputs. So is gpt-oss.

Source: OCP Microscaling Formats (MX) Specification 1.0 (2023).
"""

from __future__ import annotations

from collections.abc import Collection

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.families.config_fields import ConfigFields
from octavo.models.loading.stored.disk import Disk, require
from octavo.models.loading.stored.grids import PackedFloats, PowersOfTwo
from octavo.models.loading.stored.tensor import Affine, Format, Found

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32


def read(fields: ConfigFields) -> Format:
    """The format that a quantization_config describes."""
    del fields
    return find


def find(disk: Disk, expected: Collection[str]) -> Found:
    """See `Format`."""
    del expected
    found = Found()
    names = dict.fromkeys(
        entry.removesuffix(suffix)
        for entry in disk.entries
        for suffix in (BLOCKS, SCALES)
        if entry.endswith(suffix)
    )
    for name in names:
        blocks, scales = name + BLOCKS, name + SCALES
        shape = require(disk, blocks, ("U8",), None, scales).shape
        if len(shape) != 4 or shape[-1] != BLOCK // 2:
            raise ModelLoadError(
                f"{disk.where}: the shape of {shorten(blocks)} = {shape} is not allowed: four "
                f"dimensions, the last of {BLOCK // 2}"
            )
        require(disk, scales, ("U8",), shape[:-1], blocks)
        experts, rows, num_blocks, _ = shape
        tensor = Affine(
            shape=(experts, num_blocks * BLOCK, rows),
            numbers=PackedFloats(blocks, in_blocks=BLOCK),
            block=(1, BLOCK),
            scales=PowersOfTwo(scales),
            turned=True,
        )
        found.add(disk, name, tensor)
    return found
