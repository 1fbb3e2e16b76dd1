"""Finds markers in a text that comes in pieces."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Markers that are not fixed texts.

    Attributes:
        whole: pattern of such a marker.
        begun: pattern of its beginnings.
        most_begun: the most characters of a beginning.
    """

    whole: str
    begun: str
    most_begun: int


class Scanner:
    """Finds the first of some markers, and says how much of a text may be the beginning of one.

    Args:
        markers: none empty, none a part of another: which one comes first is then known as soon as
            it is whole.
        shape: others, which share no first character with those.
    """

    def __init__(self, markers: Sequence[str], shape: Shape | None = None) -> None:
        for marker in markers:
            assert marker, "a marker is empty"
            others = [other for other in markers if other != marker]
            assert not any(marker in other for other in others), f"{marker!r} is part of another"
        self._markers = tuple(markers)
        whole = list(map(re.escape, markers))
        begun = list(map(_beginnings, markers))
        most_begun = [len(marker) - 1 for marker in markers]
        if shape is not None:
            whole.append(shape.whole)
            begun.append(shape.begun)
            most_begun.append(shape.most_begun)
        self._whole = re.compile("|".join(whole))
        self._begun = re.compile(f"(?:{'|'.join(begun)})\\Z")
        self._most_begun = max(most_begun)

    def find(self, text: str, at: int) -> tuple[int, str | None]:
        """Where the text from `at` on holds a marker, and which.

        Without one: None, and the place from which on the text may be a marker's beginning.
        """
        whole = self._whole.search(text, at)
        if whole is not None:
            return whole.start(), whole.group()
        begun = self._begun.search(text, max(at, len(text) - self._most_begun))
        return (len(text) if begun is None else begun.start()), None

    def at(self, text: str, at: int) -> str | None:
        """The marker that stands at a place, if one does."""
        whole = self._whole.match(text, at)
        return None if whole is None else whole.group()

    def may_begin(self, text: str, at: int) -> bool:
        """Whether the text from a place to its end is the beginning of a marker."""
        rest = text[at : at + self._most_begun + 1]
        return any(marker.startswith(rest) for marker in self._markers)


@functools.cache
def scanner_of(*markers: str) -> Scanner:
    """The scanner of some of a format's own markers, of which there are few."""
    return Scanner(markers)


def _beginnings(marker: str) -> str:
    """A pattern of a marker's beginnings, from one character to all but one."""
    pattern = ""
    for char in reversed(marker[1:-1]):
        pattern = f"(?:{re.escape(char)}{pattern})?"
    return re.escape(marker[0]) + pattern if len(marker) > 1 else r"(?!)"
