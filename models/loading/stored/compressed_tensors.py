"""`quant_method: compressed-tensors`: what llm-compressor writes, layer by layer.

| format | tensors of a layer NAME |
|---|---|
| pack-quantized | `weight_packed` int32 [outputs, words], with 2^(bits - 1) added to each integer, `weight_shape` int64[2], and zeros packed along outputs |
| int-quantized | `weight` int8 [outputs, inputs], zeros int8 |
| float-quantized | `weight` F8_E4M3 [outputs, inputs] |
| nvfp4-pack-quantized | `weight_packed` uint8 [outputs, inputs / 2], `weight_scale` F8_E4M3, divided by `weight_global_scale` |
| mxfp4-pack-quantized | `weight_packed` uint8 [outputs, inputs / 2], `weight_scale` uint8, exponents of two |
| mxfp8-quantized | `weight` F8_E4M3 [outputs, inputs], `weight_scale` as of mxfp4 |

`weight_scale` is by tensor, output, group of inputs or block; so is `weight_zero_point`. With
`weight_g_idx` int32 [inputs] groups are not in order. A configuration may name another format for
some layers.

Source: the package compressed-tensors, its compressors.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.families.config_fields import ConfigFields
from octavo.models.loading.stored import modelopt
from octavo.models.loading.stored.disk import EIGHT_BITS, FLOATS, Disk, require
from octavo.models.loading.stored.fp8 import is_block
from octavo.models.loading.stored.grids import (
    Grid,
    PackedFloats,
    PackedIntegers,
    Plain,
    PowersOfTwo,
    Scales,
    num_blocks,
)
from octavo.models.loading.stored.group_size import read_group_size
from octavo.models.loading.stored.tensor import Affine, Format, Found, read_groups

WIDTHS = (2, 4, 8)
"""Bits of packed integers: those that divide a word, as others were packed in two ways."""
MX_GROUP = 32
MAX_GROUPS = 64
PATTERN = "re:"
"""How a target begins that is a pattern of names."""
MATCH_S = 0.5
"""Most that a pattern may take for a name: some would take for ever."""
SCALE = ".weight_scale"
_UNUSED = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale",
    ".output_zero_point", ".k_scale", ".v_scale", ".q_scale", ".weight_shape",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How some layers are stored.

    Attributes:
        targets: names, patterns, or classes of layers.
        format: one of `_MAKERS`.
        bits: of an integer.
        strategy: what shares a scale.
        group_size: of "group"; None is all inputs.
        block: rows and columns, of "block".
    """

    targets: tuple[str, ...]
    format: str
    bits: int
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None

    def names(self, module: str) -> bool:
        """Whether a target is this layer's name, or a pattern of it.

        Raises:
            ModelLoadError: a pattern takes too long.
        """
        return any(
            _matches(target.removeprefix(PATTERN), module)
            if target.startswith(PATTERN)
            else target == module
            for target in self.targets
        )

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of a weight that share a scale."""
        rows, columns = shape
        sizes = {
            "tensor": (rows, columns),
            "channel": (1, columns),
            "group": (1, self.group_size or columns),
            "tensor_group": (1, self.group_size or columns),
            "block": self.block or (rows, columns),
        }
        return sizes[self.strategy]


def read(fields: ConfigFields) -> Format:
    """The format that a quantization_config describes."""
    for name in ("transform_config", "sparsity_config", "moe_sparsity_config"):
        value = fields.raw(name)
        is_dense = isinstance(value, Mapping) and value.get("format") == "dense"
        if value and not is_dense:
            raise UnsupportedModelError(
                f"{fields.where}: {name} = {shorten(value)} is not supported: null"
            )
    fields.only("quantization_status", "compressed")
    groups = fields.raw("config_groups")
    if not isinstance(groups, Mapping) or not 1 <= len(groups) <= MAX_GROUPS:
        raise ModelLoadError(
            f"{fields.where}: config_groups = {shorten(groups)} is not allowed: 1 to {MAX_GROUPS} "
            "groups"
        )
    default = fields.raw("format")
    schemes = [
        _read_scheme(group, f"{fields.where}: config_groups.{shorten(name)}", default)
        for name, group in groups.items()
    ]

    def find(disk: Disk, expected: Collection[str]) -> Found:
        del expected
        found = Found(unused={name for name in disk.entries if name.endswith(_UNUSED)})
        for scales, entry in disk.entries.items():
            if not scales.endswith(SCALE):
                continue
            module = scales.removesuffix(SCALE)
            stored = entry.stored_as.removesuffix(SCALE)
            scheme = _scheme_of(module, stored, schemes, disk)
            tensor = _MAKERS[scheme.format](disk, module, scheme)
            found.add(disk, f"{module}.weight", tensor)
            if tensor.groups is None:
                found.unused.add(f"{module}.weight_g_idx")
        return found

    return find


def _scheme_of(module: str, stored: str, schemes: list[Scheme], disk: Disk) -> Scheme:
    """The scheme that names a layer, or else the first that is for a class of layers.

    Raises:
        ModelLoadError: none is.
    """
    for scheme in schemes:
        if scheme.names(stored) or scheme.names(module):
            return scheme
    for scheme in schemes:
        if any("." not in target and not target.startswith(PATTERN) for target in scheme.targets):
            return scheme
    raise ModelLoadError(
        f"{disk.where} holds {shorten(stored + SCALE)}, and no target of config_groups names it"
    )


def _read_scheme(group: Any, where: str, default: Any) -> Scheme:
    if not isinstance(group, Mapping):
        raise UnsupportedModelError(f"{where} = {shorten(group)} is not supported: an object")
    own = group.get("format")
    kind = default if own is None else own
    if not isinstance(kind, str) or kind not in _MAKERS:
        raise UnsupportedModelError(
            f"{where}: format = {shorten(kind)} is not supported: {', '.join(_MAKERS)}"
        )
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ModelLoadError(
            f"{where}: targets = {shorten(targets)} is not allowed: a list of strings"
        )
    for target in targets:
        _check_pattern(target, where)
    weights = group.get("weights")
    if not isinstance(weights, Mapping):
        raise ModelLoadError(f"{where}: weights = {shorten(weights)} is not allowed: an object")
    return _read_weights(ConfigFields(weights, f"{where}: weights"), kind, tuple(targets))


def _matches(pattern: str, module: str) -> bool:
    try:
        return regex.match(pattern, module, timeout=MATCH_S) is not None
    except TimeoutError:
        raise ModelLoadError(
            f"quantization_config: target {shorten(PATTERN + pattern)} is not allowed: a pattern "
            f"that is compared with {shorten(module)} within {MATCH_S} s"
        ) from None


def _check_pattern(target: str, where: str) -> None:
    if not target.startswith(PATTERN):
        return
    try:
        regex.compile(target.removeprefix(PATTERN))
    except (regex.error, RecursionError, OverflowError) as error:
        raise ModelLoadError(
            f"{where}: target {shorten(target)} is not allowed: a pattern ({error})"
        ) from None


def _read_weights(fields: ConfigFields, kind: str, targets: tuple[str, ...]) -> Scheme:
    bits = fields.size("num_bits")
    wanted, number = _KINDS[kind]
    if bits not in wanted:
        raise UnsupportedModelError(
            f"{fields.where}: num_bits = {bits} is not supported: "
            f"{' or '.join(map(str, wanted))}, of {kind}"
        )
    fields.only("type", number)
    group_size = read_group_size(fields)
    block = fields.raw("block_structure")
    strategy = fields.raw("strategy")
    if strategy is None:
        strategy = "tensor" if fields.raw("group_size") is None else "channel"
        strategy = strategy if group_size is None else "group"
    if strategy not in ("tensor", "channel", "group", "tensor_group", "block"):
        raise UnsupportedModelError(
            f"{fields.where}: strategy = {shorten(strategy)} is not supported: tensor, channel, "
            "group, tensor_group or block"
        )
    if strategy == "block" and not is_block(block):
        raise ModelLoadError(
            f"{fields.where}: block_structure = {shorten(block)} is not allowed: two sizes"
        )
    return Scheme(
        targets=targets,
        format=kind,
        bits=bits,
        strategy=strategy,
        group_size=group_size,
        block=(block[0], block[1]) if strategy == "block" else None,
    )


def _packed_integers(disk: Disk, module: str, scheme: Scheme) -> Affine:
    name, stated = f"{module}.weight_packed", f"{module}.weight_shape"
    rows, words = require(disk, name, ("I32",), None, "config_groups", num_dims=2).shape
    require(disk, stated, ("I64", "I32"), (2,), name)
    shape = tuple(int(size) for size in disk.read(stated))
    numbers = PackedIntegers(name=name, bits=scheme.bits, offset=1 << (scheme.bits - 1))
    if shape[0] != rows or shape[1] < 1 or numbers.num_words(shape[1]) != words:
        raise ModelLoadError(
            f"{disk.where}: {shorten(stated)} holds {shape}, which is not allowed: {rows} rows of "
            f"{words} words, by {shorten(name)}"
        )
    blocks, scales = _scales(disk, module, scheme, (shape[0], shape[1]))
    zeros = f"{module}.weight_zero_point"
    packed = PackedIntegers(
        name=zeros, bits=scheme.bits, along_rows=True, offset=1 << (scheme.bits - 1)
    )
    has_zeros = zeros in disk.entries
    if has_zeros:
        wanted = (packed.num_words(blocks[0]), blocks[1])
        require(disk, zeros, ("I32",), wanted, name)
    return Affine(
        shape=shape,
        numbers=numbers,
        block=scheme.block_of((shape[0], shape[1])),
        scales=scales,
        zeros=packed if has_zeros else None,
        groups=read_groups(
            disk, f"{module}.weight_g_idx", shape[1], scheme.group_size or shape[1], name
        ),
    )


def _plain(disk: Disk, module: str, scheme: Scheme) -> Affine:
    name = f"{module}.weight"
    dtypes = {"int-quantized": ("I8",), "float-quantized": EIGHT_BITS}
    either = ("I8", *EIGHT_BITS)
    rows, columns = require(
        disk, name, dtypes.get(scheme.format, either), None, "config_groups", num_dims=2
    ).shape
    blocks, scales = _scales(disk, module, scheme, (rows, columns))
    zeros, held = f"{module}.weight_zero_point", None
    if zeros in disk.entries:
        require(disk, zeros, ("I8", *FLOATS), blocks, name, may_lack_ones=True)
        held = Scales(zeros, blocks)
    return Affine(
        shape=(rows, columns),
        numbers=Plain(name),
        block=scheme.block_of((rows, columns)),
        scales=scales,
        zeros=held,
        groups=read_groups(
            disk, f"{module}.weight_g_idx", columns, scheme.group_size or columns, name
        ),
    )


def _mxfp8(disk: Disk, module: str, scheme: Scheme) -> Affine:
    del scheme
    name, scales = f"{module}.weight", f"{module}{SCALE}"
    rows, columns = require(disk, name, EIGHT_BITS, None, "config_groups", num_dims=2).shape
    return _in_mx_groups(disk, Plain(name), scales, (rows, columns))


def _mxfp4(disk: Disk, module: str, scheme: Scheme) -> Affine:
    del scheme
    name, scales = f"{module}.weight_packed", f"{module}{SCALE}"
    rows, half = require(disk, name, ("U8",), None, "config_groups", num_dims=2).shape
    return _in_mx_groups(disk, PackedFloats(name), scales, (rows, 2 * half))


def _in_mx_groups(disk: Disk, numbers: Grid, scales: str, shape: tuple[int, int]) -> Affine:
    groups = (shape[0], num_blocks(shape[1], MX_GROUP))
    require(disk, scales, ("U8", "F8_E8M0"), groups, numbers.names[0])
    return Affine(shape=shape, numbers=numbers, block=(1, MX_GROUP), scales=PowersOfTwo(scales))


def _nvfp4(disk: Disk, module: str, scheme: Scheme) -> Affine:
    del scheme
    return modelopt.packed(
        disk,
        f"{module}.weight",
        f"{module}.weight_packed",
        f"{module}{SCALE}",
        over=f"{module}.weight_global_scale",
    )


def _scales(
    disk: Disk, module: str, scheme: Scheme, shape: tuple[int, int]
) -> tuple[tuple[int, int], Scales]:
    """How many blocks a weight has along rows and columns, and their scales."""
    rows, columns = scheme.block_of(shape)
    blocks = (num_blocks(shape[0], rows), num_blocks(shape[1], columns))
    name = f"{module}{SCALE}"
    require(disk, name, FLOATS, blocks, f"{module}.weight", may_lack_ones=True)
    return blocks, Scales(name, blocks)


_MAKERS: dict[str, Callable[[Disk, str, Scheme], Affine]] = {
    "pack-quantized": _packed_integers,
    "int-quantized": _plain,
    "float-quantized": _plain,
    "naive-quantized": _plain,
    "nvfp4-pack-quantized": _nvfp4,
    "mxfp4-pack-quantized": _mxfp4,
    "mxfp8-quantized": _mxfp8,
}
_KINDS: dict[str, tuple[tuple[int, ...], str | None]] = {
    "pack-quantized": (WIDTHS, "int"),
    "int-quantized": ((8,), "int"),
    "float-quantized": ((8,), "float"),
    "naive-quantized": ((8,), None),
    "nvfp4-pack-quantized": ((4,), "float"),
    "mxfp4-pack-quantized": ((4,), "float"),
    "mxfp8-quantized": ((8,), "float"),
}
"""Bits that a number may have, and its type."""
