"""Sizes and rates as people write them: 16GiB, 25GB/s, 512M."""

from __future__ import annotations

import argparse
import math
import re

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?)?b?(/s)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes of "16GiB" (binary), "16GB" or "16G" (decimal) or "1000".

    Raises:
        argparse.ArgumentTypeError: it is no such size, or not above 0.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None or match[3] is not None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 16GiB or 500MB")
    return _scaled(match, text)


def parse_rate(text: str) -> int:
    """Bytes a second of "25GB/s"; the "/s" may be left out.

    Raises:
        argparse.ArgumentTypeError: it is no such rate, or not above 0.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate like 25GB/s")
    return _scaled(match, text)


def show_bytes(size: float) -> str:
    """Binary units, three digits: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def show_seconds(seconds: float) -> str:
    """ms below a second: 1.2 ms."""
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _scaled(match: re.Match[str], text: str) -> int:
    scale = (_UNITS | _BINARY)[(match[2] or "").lower()]
    size = float(match[1]) * scale
    if not math.isfinite(size) or size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return int(size)
