"""`quant_method: fp8`: weights of eight bits (E4M3), in blocks that share a scale, or whole.

NAME is F8_E4M3 [..., rows, columns]; NAME_scale_inv holds what each block is multiplied by. So are
DeepSeek V3 and the fp8 files of Qwen, GLM, MiniMax and Mistral.

Source: DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Collection

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.checks import MAX_SIZE, is_integer
from octavo.models.families.config_fields import ConfigFields
from octavo.models.loading.stored.disk import EIGHT_BITS, Disk, require
from octavo.models.loading.stored.grids import Plain, Scales, num_blocks
from octavo.models.loading.stored.tensor import Affine, Format, Found

SUFFIX = "_scale_inv"
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
_UNUSED = ("activation_scale", "input_scale", ".k_scale", ".v_scale")


def read(fields: ConfigFields) -> Format:
    """The format that a quantization_config describes."""
    block = fields.raw("weight_block_size")
    if block is not None and not is_block(block):
        raise ModelLoadError(
            f"{fields.where}: weight_block_size = {shorten(block)} is not allowed: two integers "
            f"from 1 to {MAX_SIZE}"
        )
    fields.only("fmt", "e4m3")

    def find(disk: Disk, expected: Collection[str]) -> Found:
        del expected
        found = Found(unused={name for name in disk.entries if name.endswith(_UNUSED)})
        for scales in disk.entries:
            if scales.endswith(SUFFIX):
                name = scales.removesuffix(SUFFIX)
                found.add(disk, name, scaled(disk, name, scales, block))
        return found

    return find


def is_block(value: object) -> bool:
    """Whether a field names the rows and columns of a block."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(is_integer(size, 1, MAX_SIZE) for size in value)
    )


def scaled(disk: Disk, name: str, scales: str, block: list[int] | None) -> Affine:
    """A tensor of eight bits.

    Args:
        disk: the checkpoint.
        name, scales: of its numbers, and of what they are multiplied by.
        block: rows and columns that share a scale; None is all of a matrix.

    Raises:
        ModelLoadError: another dtype or shape.
    """
    shape = require(disk, name, EIGHT_BITS, None, scales, least_dims=2).shape
    rows, columns = block or shape[-2:]
    blocks = (*shape[:-2], num_blocks(shape[-2], rows), num_blocks(shape[-1], columns))
    require(disk, scales, SCALE_DTYPES, blocks, name, may_lack_ones=True)
    return Affine(
        shape=shape, numbers=Plain(name), block=(rows, columns), scales=Scales(scales, blocks)
    )
