"""`quant_method: gptq`: integers of a few bits with a scale and a zero for each group of inputs.

`NAME.qweight` int32 [inputs · bits / 32, outputs] packs inputs, `NAME.qzeros` int32
[groups, outputs · bits / 32] outputs, from the lowest bits on; `NAME.scales` is [groups, outputs].
Three bits follow each other over the borders of words. `NAME.g_idx` int32 [inputs] says which group
an input is in: without it, or where activations were not ordered, groups follow each other. The
first form of checkpoints stores zeros less 1, which wraps.

Source: Frantar et al., GPTQ, arXiv 2210.17323; forms of checkpoints as of GPTQModel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from octavo.engine.errors import UnsupportedModelError, shorten
from octavo.models.families.config_fields import ConfigFields
from octavo.models.loading.stored.disk import FLOATS, Disk, require
from octavo.models.loading.stored.grids import WORD_BITS, PackedIntegers, Scales, num_blocks
from octavo.models.loading.stored.group_size import read_group_size
from octavo.models.loading.stored.tensor import Affine, Format, Found, read_groups

WIDTHS = (2, 3, 4, 8)
FORMS = {"gptq": 1, "gptq_v2": 0}
"""What `checkpoint_format` may be -> what is added to stored zeros."""
SUFFIX = ".qweight"
SKIPS = "-:"
"""How a rule for some modules begins that leaves them as they are, which their tensors show."""


def read(fields: ConfigFields) -> Format:
    """The format that a quantization_config describes."""
    bits = fields.raw("bits")
    if isinstance(bits, bool) or bits not in WIDTHS:
        raise UnsupportedModelError(
            f"{fields.where}: bits = {shorten(bits)} is not supported: {_listed(WIDTHS)}"
        )
    form = fields.text("checkpoint_format", "gptq")
    if form not in FORMS:
        raise UnsupportedModelError(
            f"{fields.where}: checkpoint_format = {shorten(form)} is not supported: "
            f"{_listed(FORMS)}"
        )
    fields.only("pack_dtype", "int32")
    rules = fields.raw("dynamic") or {}
    if not isinstance(rules, Mapping) or not all(
        isinstance(rule, str) and rule.startswith(SKIPS) for rule in rules
    ):
        raise UnsupportedModelError(
            f"{fields.where}: dynamic = {shorten(rules)} is not supported: rules that begin with "
            f"{SKIPS!r}"
        )
    group_size, added = read_group_size(fields), FORMS[form]

    def find(disk: Disk, expected: Collection[str]) -> Found:
        found = Found()
        for weight in disk.entries:
            if not weight.endswith(SUFFIX):
                continue
            name = weight.removesuffix(SUFFIX)
            tensor = _tensor(disk, name, bits, group_size, added)
            found.add(disk, f"{name}.weight", tensor)
            if tensor.groups is None:
                found.unused.add(f"{name}.g_idx")
            # Whoever wrote the file may have given each layer a bias.
            bias = f"{name}.bias"
            if bias in disk.entries and bias not in expected and not disk.read(bias).any():
                found.unused.add(bias)
        return found

    return find


def _tensor(disk: Disk, name: str, bits: int, group_size: int | None, added: int) -> Affine:
    weight, zeros, scales = (f"{name}.{part}" for part in ("qweight", "qzeros", "scales"))
    words, outputs = require(disk, weight, ("I32",), None, "quant_method", num_dims=2).shape
    inputs = words * WORD_BITS // bits
    group = group_size or inputs
    groups = num_blocks(inputs, group)
    straddles = WORD_BITS % bits != 0
    packed_zeros = PackedIntegers(
        name=zeros, bits=bits, along_rows=True, transposed=True, straddles=straddles, added=added
    )
    require(disk, zeros, ("I32",), (groups, packed_zeros.num_words(outputs)), weight)
    require(disk, scales, FLOATS, (groups, outputs), weight)
    return Affine(
        shape=(outputs, inputs),
        numbers=PackedIntegers(name=weight, bits=bits, transposed=True, straddles=straddles),
        block=(1, group),
        scales=Scales(scales, (outputs, groups), transposed=True),
        zeros=packed_zeros,
        groups=read_groups(disk, f"{name}.g_idx", inputs, group, weight),
    )


def _listed(values: Collection[object]) -> str:
    return ", ".join(map(str, values))
