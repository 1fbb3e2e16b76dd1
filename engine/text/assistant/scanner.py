"""Finds markers in a text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence


class Scanner:
    """Finds the first of some markers, and says how much of a text may be the beginning of one.

    Args:
        markers: none empty, none a part of another: which one comes first is then known as soon as
            it is whole.
    """

    def __init__(self, markers: Sequence[str]) -> None:
        for marker in markers:
            assert marker, "a marker is empty"
            others = [other for other in markers if other != marker]
            assert not any(marker in other for other in others), f"{marker!r} is part of another"
        self._whole = re.compile("|".join(map(re.escape, markers)))
        self._begun = re.compile(f"(?:{'|'.join(map(_beginnings, markers))})\\Z")
        self._most_begun = max(map(len, markers)) - 1

    def find(self, text: str, at: int) -> tuple[int, str | None]:
        """Where the text from `at` on holds a marker, and which.

        Without one: None, and the place from which on the text may be a marker's beginning.
        """
        whole = self._whole.search(text, at)
        if whole is not None:
            return whole.start(), whole.group()
        begun = self._begun.search(text, max(at, len(text) - self._most_begun))
        return (len(text) if begun is None else begun.start()), None


def _beginnings(marker: str) -> str:
    """A pattern of a marker's beginnings, from one character to all but one."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(marker[0]) + pattern if len(marker) > 1 else r"(?!)"
