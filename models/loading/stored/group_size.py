"""How many inputs share a scale."""

from __future__ import annotations

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.checks import MAX_SIZE, is_integer
from octavo.models.families.config_fields import ConfigFields


def read_group_size(fields: ConfigFields) -> int | None:
    """The field `group_size`; None for all inputs, which it says by -1 or null.

    Raises:
        ModelLoadError: anything but that and a size.
    """
    value = fields.raw("group_size")
    if value is None or value == -1:
        return None
    if not is_integer(value, 1, MAX_SIZE):
        raise ModelLoadError(
            f"{fields.where}: group_size = {shorten(value)} is not allowed: -1, or an integer from "
            f"1 to {MAX_SIZE}"
        )
    size: int = value
    return size
