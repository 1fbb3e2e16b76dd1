"""Prefix pages on their way from one engine to another."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from octavo.engine.errors import InvalidRequestError, shorten
from octavo.engine.kv.page_hash import HASH_BYTES, PageHash


@dataclass(frozen=True, slots=True, kw_only=True)
class PageBatch:
    """Full pages of keys and values, each under the name of the prefix that it ends.

    A name covers every token before the page's end, tenant and salt included: whoever holds a page
    of that name, computed by the same model, holds the same. So a page needs no owner, no place
    and no lease: where it is lacking or unwanted, it is computed.

    Attributes:
        layout: what the pages are of, and how they lie: see `PageTransfer`. Batches of another
            layout are refused.
        names: of the pages, in the order of their prefix.
        contents: of each page, all layers together.
        checksum: CRC-32 of names and contents.
    """

    layout: str
    names: tuple[PageHash, ...]
    contents: tuple[bytes, ...]
    checksum: int

    @classmethod
    def of(cls, layout: str, names: Sequence[PageHash], contents: Sequence[bytes]) -> PageBatch:
        """A batch with its checksum."""
        named, held = tuple(names), tuple(contents)
        return cls(layout=layout, names=named, contents=held, checksum=_checksum(named, held))

    @property
    def num_bytes(self) -> int:
        """Of all contents."""
        return sum(map(len, self.contents))

    def check(self, layout: str, page_bytes: int) -> None:
        """Refuses what an engine cannot use, or what was damaged on its way.

        Args:
            layout: the engine's.
            page_bytes: of one of its pages.

        Raises:
            InvalidRequestError: names the field.
        """
        if self.layout != layout:
            raise InvalidRequestError("layout", *_first_difference(self.layout, layout))
        if len(self.names) != len(self.contents):
            allowed = f"one for each of {len(self.names)} names"
            raise InvalidRequestError("contents", f"{len(self.contents)} pages", allowed)
        for name, content in zip(self.names, self.contents, strict=True):
            if len(name) != HASH_BYTES:
                raise InvalidRequestError("names", f"{len(name)} bytes", f"{HASH_BYTES} bytes each")
            if len(content) != page_bytes:
                allowed = f"{page_bytes} bytes each"
                raise InvalidRequestError("contents", f"{len(content)} bytes", allowed)
        found = _checksum(self.names, self.contents)
        if found != self.checksum:
            raise InvalidRequestError("checksum", f"{found:#010x}", f"{self.checksum:#010x}")


def _first_difference(theirs: str, ours: str) -> tuple[str, str]:
    """The first parts of two layouts that are not the same."""
    for one, other in zip_longest(theirs.split(", "), ours.split(", "), fillvalue="nothing"):
        if one != other:
            return shorten(one), shorten(other)
    return shorten(theirs), shorten(ours)


def _checksum(names: Sequence[PageHash], contents: Sequence[bytes]) -> int:
    value = 0
    for part in (*names, *contents):
        value = zlib.crc32(part, value)
    return value
