"""How many parts a protobuf message has, found before it is parsed.

Parsing makes an object of each message within a message, and holds the interpreter: 4 MB of small
ones take 150 ms and more, in which no token is sent. Lists of numbers and texts take a few.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

_VARINT, _FIXED64, _BYTES, _GROUP_BEGINS, _GROUP_ENDS, _FIXED32 = range(6)
_MAX_VARINT_BYTES = 10


def num_parts(raw: bytes, kind: type[Message], most: int) -> int:
    """Fields of a message and of all messages within it, counted up to `most` + 1.

    A message that is not well-formed is counted as far as it can be read.

    Args:
        raw: as it came.
        kind: what it is to be parsed as.
        most: where counting ends: the time that it takes goes with this alone.
    """
    found = 0
    left: list[tuple[int, int, Any]] = [(0, len(raw), kind.DESCRIPTOR)]
    while left:
        at, end, descriptor = left.pop()
        while at < end:
            found += 1
            if found > most:
                return found
            tag, at = _varint(raw, at, end)
            wire = tag & 7
            if wire == _VARINT:
                _, at = _varint(raw, at, end)
            elif wire == _BYTES:
                size, at = _varint(raw, at, end)
                field = descriptor.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    left.append((at, min(at + size, end), field.message_type))
                at += size
            elif wire in (_FIXED64, _FIXED32):
                at += 8 if wire == _FIXED64 else 4
            elif wire not in (_GROUP_BEGINS, _GROUP_ENDS):  # what is in a group counts as fields
                break
    return found


def _varint(raw: bytes, at: int, end: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        if at >= end:
            break
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    return value, at
