"""`quant_method: awq`: four-bit integers with a scale and a zero for each group of inputs.

`NAME.qweight` int32 [inputs, outputs / 8] and `NAME.qzeros` int32 [groups, outputs / 8] hold eight
outputs a word, in an order of their own; `NAME.scales` is [groups, outputs].

Source: Lin et al., AWQ: Activation-aware Weight Quantization, arXiv 2306.00978; the order of
numbers is that of AutoAWQ's "gemm" kernels.
"""

from __future__ import annotations

from collections.abc import Collection

from octavo.models.families.config_fields import ConfigFields
from octavo.models.loading.stored.disk import FLOATS, Disk, require
from octavo.models.loading.stored.grids import PackedIntegers, Scales, num_blocks
from octavo.models.loading.stored.group_size import read_group_size
from octavo.models.loading.stored.tensor import Affine, Format, Found

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each four bits of a word are, from the lowest."""
SUFFIX = ".qweight"


def read(fields: ConfigFields) -> Format:
    """The format that a quantization_config describes."""
    fields.only("bits", BITS)
    fields.only("version", "gemm")
    fields.only("zero_point", True)
    group_size = read_group_size(fields)

    def find(disk: Disk, expected: Collection[str]) -> Found:
        del expected
        found = Found()
        for weight in disk.entries:
            if not weight.endswith(SUFFIX):
                continue
            name = weight.removesuffix(SUFFIX)
            inputs, words = require(disk, weight, ("I32",), None, "quant_method", num_dims=2).shape
            outputs = words * len(ORDER)
            group = group_size or inputs
            groups = num_blocks(inputs, group)
            zeros, scales = f"{name}.qzeros", f"{name}.scales"
            require(disk, zeros, ("I32",), (groups, words), weight)
            require(disk, scales, FLOATS, (groups, outputs), weight)

            def packed(tensor: str) -> PackedIntegers:
                return PackedIntegers(
                    name=tensor, bits=BITS, along_rows=True, transposed=True, order=ORDER
                )

            tensor = Affine(
                shape=(outputs, inputs),
                numbers=packed(weight),
                block=(1, group),
                scales=Scales(scales, (outputs, groups), transposed=True),
                zeros=packed(zeros),
            )
            found.add(disk, f"{name}.weight", tensor)
        return found

    return find
