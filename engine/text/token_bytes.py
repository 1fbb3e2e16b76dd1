"""The bytes each token stands for.

A token rarely ends where a character ends, so text is put together from bytes and decoded once.
That makes decoding token by token exactly equal to decoding all at once, which decoding through
the `tokenizers` library does not promise: it turns a whole run of byte tokens into replacement
characters when only the last of them is wrong. On valid text the two agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import tokenizers

from octavo.engine.errors import UnsupportedModelError, shorten

MAX_REPLACEMENT_CHARS = 16
"""Longest text that a decoder may put in place of another, in every token of a vocabulary."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """Token id -> bytes, read from a tokenizer's decoder and remembered.

    Args:
        backend: the tokenizer.

    Attributes:
        strip_spaces: how many leading spaces the text as a whole loses.
        whole_texts: by whether special tokens are skipped, token id -> its text between whole
            characters, of tokens that are whole characters themselves; filled by who reads it.

    Raises:
        UnsupportedModelError: a decoder that does not map each token to bytes of its own.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = False
        self._byte_level = False
        self._metaspace: tuple[str, bool] | None = None
        self._separator = b""
        self.strip_spaces = 0
        self._read_decoder()
        self._pieces: dict[int, bytes] = {}
        self._first_pieces: dict[int, bytes] = {}
        self.whole_texts: dict[bool, dict[int, str]] = {False: {}, True: {}}

    def piece(self, token_id: int, *, first: bool) -> bytes:
        """A token's bytes; `first` if no token comes before it in the text. b"" for no token."""
        pieces = self._first_pieces if first else self._pieces
        piece = pieces.get(token_id)
        if piece is None:
            piece = pieces[token_id] = self._spell(token_id, first)
        return piece

    def _spell(self, token_id: int, first: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._metaspace is not None:
            mark, dropped_at_start = self._metaspace
            token = token.replace(mark, "" if first and dropped_at_start else " ")
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._byte_level and all(char in BYTE_OF_CHAR for char in token):
            return bytes(BYTE_OF_CHAR[char] for char in token)
        return (b"" if first else self._separator) + token.encode()

    def _read_decoder(self) -> None:
        if self._backend.decoder is None:
            self._separator = b" "
            return
        decoder = json.loads(self._backend.decoder.__getstate__())
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        fused = False
        for step in steps:
            match step:
                case {"type": "ByteLevel"} if not fused:
                    self._byte_level = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new} if (
                    not fused and old and len(new) <= MAX_REPLACEMENT_CHARS
                ):
                    self._replacements.append((old, new))
                case {"type": "Metaspace", "replacement": mark} if not fused:
                    self._metaspace = mark, step.get("prepend_scheme", "always") != "never"
                case {"type": "ByteFallback"} if not fused:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                    self.strip_spaces += start
                case _:
                    raise UnsupportedModelError(
                        f"the tokenizer's decoder step {shorten(step, 300)} is not supported: "
                        f"ByteLevel, Replace of a string by at most {MAX_REPLACEMENT_CHARS} "
                        "characters, Metaspace, ByteFallback, Fuse, then Strip of leading spaces"
                    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else from U+0100 on."""
    printable = _ranges((0x21, 0x7E), (0xA1, 0xAC), (0xAE, 0xFF))
    alphabet = {chr(byte): byte for byte in printable}
    for byte in range(256):
        if byte not in printable:
            alphabet[chr(256 + len(alphabet) - len(printable))] = byte
    return alphabet


def _ranges(*bounds: tuple[int, int]) -> frozenset[int]:
    return frozenset(number for low, high in bounds for number in range(low, high + 1))


BYTE_OF_CHAR = _byte_alphabet()
"""Character of a byte-level vocabulary -> the byte it stands for."""


class TextAssembler:
    """Joins tokens' bytes: drops skipped ids and the leading spaces that the decoder drops.

    Args:
        token_bytes: the tokenizer's.
        skipped_ids: ids that leave no trace in the text.
    """

    def __init__(self, token_bytes: TokenBytes, skipped_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._first = True
        self._spaces_to_strip = token_bytes.strip_spaces

    @property
    def is_inside(self) -> bool:
        """Whether text has begun: a token's bytes do not depend on those before it any more."""
        return not (self._first or self._spaces_to_strip)

    def join(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of the next tokens."""
        joined = bytearray()
        for token_id in token_ids:
            if token_id not in self._skipped_ids:
                joined += self._token_bytes.piece(token_id, first=self._first)
                self._first = False
        while self._spaces_to_strip and joined:
            if joined[0] != 0x20:
                self._spaces_to_strip = 0
            else:
                del joined[0]
                self._spaces_to_strip -= 1
        return bytes(joined)
