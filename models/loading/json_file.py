"""JSON files that hold one object, or a list of objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.engine.errors import ModelLoadError

MAX_JSON_BYTES = 1 << 24
"""Largest file that is parsed: ten times the largest that exist, and some 300 MB as objects."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object, all of whose strings are valid Unicode.

    Raises:
        ModelLoadError: it cannot be read, is too large, or holds something else.
    """
    values = _read(path)
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} is not allowed: one JSON object")
    return values


def read_json_list(path: Path, most: int) -> list[dict[str, Any]]:
    """As `read_json`, of a file that holds a list of objects, at most so many.

    Raises:
        ModelLoadError: it cannot be read, is too large, or holds something else.
    """
    values = _read(path)
    is_list = isinstance(values, list) and len(values) <= most
    if not is_list or not all(isinstance(value, dict) for value in values):
        raise ModelLoadError(f"{path} is not allowed: a list of at most {most} JSON objects")
    return values


def _read(path: Path) -> Any:
    text = read_text(path, MAX_JSON_BYTES)
    try:
        values = json.loads(text)
        if "\\u" in text:  # an escape may spell half a surrogate pair, which nothing can encode
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return values


def read_text(path: Path, max_bytes: int) -> str:
    """A UTF-8 file, without the byte order mark that it may begin with. Its size is asked before
    anything is read: a sparse one may claim any.

    Raises:
        ModelLoadError: it cannot be read, or has more than `max_bytes`.
    """
    check_file_size(path, max_bytes)
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def check_file_size(path: Path, max_bytes: int) -> None:
    """Refuse a file that is too large to be what its name says.

    Raises:
        ModelLoadError: it has more than `max_bytes`, or cannot be asked.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if size > max_bytes:
        raise ModelLoadError(f"{path} = {size} bytes is not allowed: at most {max_bytes}")
