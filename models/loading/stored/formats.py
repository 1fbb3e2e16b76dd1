"""Which format a checkpoint's configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.engine.errors import UnsupportedModelError, shorten
from octavo.models.families.config_fields import ConfigFields
from octavo.models.loading.stored import (
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)
from octavo.models.loading.stored.tensor import Format

FIELD = "quantization_config"


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """A kind of quantized checkpoints.

    Attributes:
        read: its configuration.
        what: of it is read.
        checked: whose numbers these were compared with.
    """

    read: Callable[[ConfigFields], Format]
    what: str
    checked: str


_MODELOPT = StoredFormat(
    modelopt.read, "FP8 with a scale a tensor, NVFP4", "the format's description"
)
FORMATS = {
    "awq": StoredFormat(awq.read, "four bits of the gemm kernels", "AutoAWQ"),
    "bitsandbytes": StoredFormat(
        bitsandbytes.read, "nf4 and fp4, double quantized or not; int8", "bitsandbytes"
    ),
    "compressed-tensors": StoredFormat(
        compressed_tensors.read,
        "2, 4 and 8 bits packed, int8, fp8 by tensor, output or block, NVFP4, MXFP4, MXFP8, mixed",
        "compressed-tensors",
    ),
    "fp8": StoredFormat(fp8.read, "E4M3 in blocks or by tensor", "transformers"),
    "gptq": StoredFormat(
        gptq.read,
        "2, 3, 4 and 8 bits, in order of activations or not, both forms",
        "arithmetic of GPTQModel",
    ),
    "modelopt": _MODELOPT,
    "modelopt_fp4": _MODELOPT,
    "mxfp4": StoredFormat(mxfp4.read, "experts of gpt-oss", "transformers"),
}
"""By what `quant_method` may be."""


def without_quantization(values: Mapping[str, Any]) -> tuple[dict[str, Any], Format | None]:
    """A config.json without what it says of how weights are stored, and their format.

    A composite checkpoint may say it of its text model alone.

    Raises:
        UnsupportedModelError: an unknown format, or a kind of one.
        ModelLoadError: a field of it makes no sense.
    """
    left = {name: value for name, value in values.items() if name != FIELD}
    how = values.get(FIELD)
    text = left.get("text_config")
    if isinstance(text, Mapping) and FIELD in text:
        left["text_config"] = {name: value for name, value in text.items() if name != FIELD}
        how = how or text[FIELD]
    if not how:
        return left, None
    where = f"config.json: {FIELD}"
    method = how.get("quant_method") if isinstance(how, Mapping) else how
    if not isinstance(method, str) or method not in FORMATS:
        raise UnsupportedModelError(
            f"{where}: quant_method = {shorten(method)} is not supported: {', '.join(FORMATS)}"
        )
    return left, FORMATS[method].read(ConfigFields(how, where))
