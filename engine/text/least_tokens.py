"""How few tokens a text can have, by its length alone.

A tokenizer bounds them if every byte of a text ends up in some token: nothing in it drops or joins
parts of a text. A text then has no fewer tokens than its bytes over those of the longest token, and
one that is too long for a context is known to be without being tokenized.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from octavo.engine.text.token_bytes import BYTE_OF_CHAR

NORMAL_FORM_SHRINKS = 4
"""A text in one of Unicode's normal forms has at least a quarter of the bytes that it had before:
`z` may have been a mathematical letter of four."""

_Step = Mapping[str, Any]
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_UTF8_BYTES = frozenset(range(0xF5)) - {0xC0, 0xC1}
_ASCII = frozenset(range(0x80))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSizes:
    """How many bytes of a text one token takes.

    Attributes:
        most_bytes: that one token can stand for.
        dropped: bytes that the vocabulary has no token for, and that leave no trace.
    """

    most_bytes: int
    dropped: bytes = b""

    def least_tokens(self, text: str) -> int:
        """No fewer tokens than these does the text have."""
        data = text.encode("utf-8", "surrogatepass")
        return -(-len(data.translate(None, self.dropped)) // self.most_bytes)


def token_sizes(backend: tokenizers.Tokenizer) -> TokenSizes | None:
    """What a tokenizer's parts say of the size of its tokens.

    Returns:
        a bound, not always reached; None for a tokenizer that drops parts of a text, joins what it
        does not know into one token, or is put together from parts not known here.
    """
    shrinks = 1
    for step in _steps(backend.normalizer, "normalizers"):
        if step["type"] in _NORMAL_FORMS:
            shrinks *= NORMAL_FORM_SHRINKS
        elif not _keeps_length(step):
            return None
    cuts = _steps(backend.pre_tokenizer, "pretokenizers")
    if not all(_keeps_all(step) for step in cuts):
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # it takes in any number of spaces beside it
    vocabulary = backend.get_vocab(with_added_tokens=False)
    byte_level = any(step["type"] == "ByteLevel" for step in cuts)
    unknown = _unknown_bytes(backend, vocabulary, byte_level)
    if unknown is None or (shrinks > 1 and not unknown <= _ASCII):
        return None  # what a normal form makes of a letter has other bytes
    spelled = map(len, vocabulary) if byte_level else (len(token.encode()) for token in vocabulary)
    longest = max((max(spelled, default=1), *(len(token.content.encode()) for token in added)))
    return TokenSizes(most_bytes=shrinks * longest, dropped=bytes(sorted(unknown)))


def _steps(part: Any, plural: str) -> list[_Step]:
    """The steps of a normalizer or pre-tokenizer, those of sequences in their order."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    return _flat(state, plural)


def _flat(step: _Step, plural: str) -> list[_Step]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for member in step[plural] for inner in _flat(member, plural)]


def _keeps_length(step: _Step) -> bool:
    """Whether a normalizer's step never makes a text shorter."""
    match step:
        case {"type": "Prepend"}:
            return True
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return len(new.encode()) >= len(old.encode())
    return False


def _keeps_all(step: _Step) -> bool:
    """Whether a pre-tokenizer's step only cuts, or spells what it cuts with as many characters."""
    match step:
        case {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
    return False


def _unknown_bytes(
    backend: tokenizers.Tokenizer, vocabulary: Mapping[str, int], byte_level: bool
) -> frozenset[int] | None:
    """Bytes that no token spells; None where that is not said byte by byte."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return None
    if byte_level:
        known = {byte for char, byte in BYTE_OF_CHAR.items() if char in vocabulary}
        return _UTF8_BYTES - known
    if model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in _UTF8_BYTES):
        return frozenset()
    return None
