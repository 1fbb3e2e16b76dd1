"""Text from tokens as they come."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from octavo.engine.text.token_bytes import TextAssembler
from octavo.engine.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns a stream of tokens into a stream of text, in constant time a token.

    What `append` and a last `flush` return, joined, is `tokenizer.decode` of all the tokens.
    `append` never returns part of a character: its bytes wait for the rest, and come out of
    `flush` as a replacement character if the rest never came.

    Args:
        tokenizer: of the model.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._assembler = TextAssembler(
            tokenizer.token_bytes, tokenizer.special_ids if skip_special_tokens else frozenset()
        )
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def append(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        return self._characters.decode(self._assembler.join(token_ids))

    def flush(self) -> str:
        """What is left once no more tokens come."""
        return self._characters.decode(b"", final=True)
