"""`quant_method: modelopt`: weights in E4M3 with one scale, or in NVFP4.

NVFP4: `NAME.weight` uint8 [outputs, inputs / 2] holds two numbers of four bits (E2M1) a byte, the
first in its low half; `NAME.weight_scale` F8_E4M3 [outputs, inputs / 16] scales sixteen of them,
and `NAME.weight_scale_2` all.

Source: NVIDIA, TensorRT Model Optimizer; Pretraining LLMs with NVFP4, arXiv 2509.25149.
"""

from __future__ import annotations

from collections.abc import Collection

from octavo.engine.errors import UnsupportedModelError, shorten
from octavo.models.families.config_fields import ConfigFields
from octavo.models.loading.stored.disk import EIGHT_BITS, FLOATS, Disk, require
from octavo.models.loading.stored.fp8 import scaled
from octavo.models.loading.stored.grids import PackedFloats, Scales
from octavo.models.loading.stored.tensor import Affine, Format, Found

ALGORITHMS = ("FP8", "NVFP4")
GROUP = 16
SUFFIX = ".weight_scale"
_UNUSED = (".input_scale", ".k_scale", ".v_scale", ".q_scale", ".output_scale")


def read(fields: ConfigFields) -> Format:
    """The format that a quantization_config describes."""
    algorithm = fields.raw("quant_algo")
    if algorithm not in ALGORITHMS:
        raise UnsupportedModelError(
            f"{fields.where}: quant_algo = {shorten(algorithm)} is not supported: "
            f"{' or '.join(ALGORITHMS)}"
        )

    def find(disk: Disk, expected: Collection[str]) -> Found:
        del expected
        found = Found(unused={name for name in disk.entries if name.endswith(_UNUSED)})
        for scales in disk.entries:
            if not scales.endswith(SUFFIX):
                continue
            weight = scales.removesuffix("_scale")
            if algorithm == "FP8":
                tensor = scaled(disk, weight, scales, None)
            else:
                tensor = packed(disk, weight, weight, scales, by=f"{weight}_scale_2")
            found.add(disk, weight, tensor)
        return found

    return find


def packed(
    disk: Disk,
    name: str,
    numbers: str,
    scales: str,
    *,
    by: str | None = None,
    over: str | None = None,
) -> Affine:
    """A tensor in NVFP4.

    Args:
        disk: the checkpoint.
        name: of the tensor, for messages.
        numbers, scales: of its parts on disk.
        by, over: what all scales are multiplied or divided by.

    Raises:
        ModelLoadError: another dtype or shape.
    """
    rows, half = require(disk, numbers, ("U8",), None, name, num_dims=2).shape
    shape = (rows, 2 * half)
    groups = (rows, -(-shape[1] // GROUP))
    require(disk, scales, EIGHT_BITS, groups, numbers)
    for one in (by, over):
        if one is not None:
            require(disk, one, FLOATS, (1,), numbers, may_lack_ones=True)
    return Affine(
        shape=shape,
        numbers=PackedFloats(numbers),
        block=(1, GROUP),
        scales=Scales(scales, groups, by=by, over=over),
    )
