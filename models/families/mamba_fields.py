"""The fields of Mamba-2 that hybrids of Granite 4 and Falcon-H1 have in common."""

from __future__ import annotations

import math
from typing import Any

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.blocks.mamba2 import Mamba2
from octavo.models.families.config_fields import ConfigFields

_FIELDS = (
    "mamba_chunk_size",  # how chunks are cut, and no more
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_proj_bias",
    "time_step_limit",
)


def ignore(fields: ConfigFields) -> None:
    """Let all of them be there, read or not."""
    for name in _FIELDS:
        fields.ignore(name)


def mamba(fields: ConfigFields, eps: float, **changes: Any) -> Mamba2:
    """The Mamba-2 of all layers that have one.

    Args:
        eps: of its norm.
        changes: further attributes of `Mamba2`.

    Raises:
        UnsupportedModelError: limits of step sizes, or biases of projections.
        ModelLoadError: heads that do not make up the layer's width, or a malformed field.
    """
    fields.only("mamba_proj_bias", False)
    limit = fields.raw("time_step_limit")
    if limit not in (None, [0.0, math.inf], (0.0, math.inf)):
        raise UnsupportedModelError(
            f"{fields.where}: time_step_limit = {shorten(limit)} is not supported: none"
        )
    inner = fields.size("mamba_d_ssm", default=None)
    said_by = "mamba_d_ssm" if inner else "mamba_expand * hidden_size"
    inner = inner or fields.size("mamba_expand", default=2) * fields.size("hidden_size")
    num_heads = fields.size("mamba_n_heads", default=128)
    size = fields.raw("mamba_d_head")
    size = inner // num_heads if size in (None, "auto") else fields.size("mamba_d_head")
    if size * num_heads != inner:
        raise ModelLoadError(
            f"{fields.where}: mamba_d_head = {size} is not allowed: {said_by} ({inner}) / "
            f"mamba_n_heads ({num_heads})"
        )
    return Mamba2(
        num_heads=num_heads,
        num_groups=fields.size("mamba_n_groups", default=1),
        head_size=size,
        state_size=fields.size("mamba_d_state", default=256),
        width=fields.size("mamba_d_conv", default=4),
        eps=eps,
        conv_bias=fields.boolean("mamba_conv_bias", default=True),
        **changes,
    )
