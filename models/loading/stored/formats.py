"""Which format a checkpoint's configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
FORMATS: dict[str, Callable[[ConfigFields], Format]] = {
    "awq": awq.read,
    "bitsandbytes": bitsandbytes.read,
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "modelopt": modelopt.read,
    "modelopt_fp4": modelopt.read,
    "mxfp4": mxfp4.read,
}
"""What `quant_method` may be."""


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
    return left, FORMATS[method](ConfigFields(how, where))
