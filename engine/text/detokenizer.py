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
        self._texts = tokenizer.token_bytes.whole_texts[skip_special_tokens]
        self._is_whole = False
        """Whether text has begun and no character is waiting for the rest of its bytes."""

    def append(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        self._is_whole = False
        return self._characters.decode(self._assembler.join(token_ids))

    def append_one(self, token_id: int) -> str:
        """As `append`, for one token: between whole characters its text is looked up."""
        was_whole = self._is_whole
        if was_whole:
            known = self._texts.get(token_id)
            if known is not None:
                return known
        text = self.append((token_id,))
        self._is_whole = self._assembler.is_inside and not self._characters.getstate()[0]
        if was_whole and self._is_whole:
            self._texts[token_id] = text
        return text

    def flush(self) -> str:
        """What is left once no more tokens come."""
        return self._characters.decode(b"", final=True)
