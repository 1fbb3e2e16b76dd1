"""Checks of a configuration's numbers, and the limits that they keep. No JAX."""

from __future__ import annotations

from typing import Any

from octavo.engine.errors import ModelLoadError, shorten

MAX_SIZE = 2**31 - 1
"""Largest size of a model, because indices on devices are int32."""
MAX_LAYERS = 4096
"""Most layers of a model: far above any that exists, and little to build in vain."""
MAX_TENSORS = 64 * MAX_LAYERS
"""Most tensors of a checkpoint: Kimi K2 has 384 experts in 61 layers, three matrices
each, and three tensors for each matrix."""
MAX_EOS_TOKENS = 24
"""Most ids that end a text: a row on a device has room for as many."""
MIN_NUMBER, MAX_NUMBER = 2.0**-126, 3.4028234663852886e38
"""Smallest and largest positive numbers that float32 holds in full precision."""


def is_integer(value: Any, low: int, high: int) -> bool:
    """Whether a value is an integer, no flag, from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def check_number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    """Refuse what is no number from `low` to `high`.

    Raises:
        ModelLoadError: naming the field, its value and what is allowed. So do the checks below.
    """
    # Compared before anything converts it: an integer of 400 digits is no float.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise ModelLoadError(f"{name} = {shorten(value)} is not allowed: {allowed}")


def check_positive(name: str, value: Any) -> None:
    """Refuse what is no number above 0 that float32 holds in full precision."""
    check_number(name, value, MIN_NUMBER, MAX_NUMBER, "a number above 0 that float32 holds")


def check_size(name: str, value: Any, high: int = MAX_SIZE) -> None:
    """Refuse what is no integer from 1 to `high`."""
    if not is_integer(value, 1, high):
        raise ModelLoadError(
            f"{name} = {shorten(value)} is not allowed: an integer from 1 to {high}"
        )


def check_flag(name: str, value: Any) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise ModelLoadError(f"{name} = {shorten(value)} is not allowed: true or false")
