"""Bad words as the token sequences that spell them."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.tokenizer import Tokenizer


def bad_word_token_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """The token sequences whose last token is forbidden once the others stand before it.

    A word is spelled as at the start of a text and as after a space, for these are different
    tokens; spaces before the word are not part of it. A spelling after a space that ends with the
    other spelling is left out, since forbidding that one forbids it too. A word that the model
    spells in any other way is not caught.

    Args:
        tokenizer: of the model.
        words: not empty each.

    Returns:
        sequences of one token or more, none twice.

    Raises:
        InvalidRequestError: a word of which nothing is left as tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        plain = tuple(tokenizer.encode(bare, add_special_tokens=False)) if bare else ()
        if not plain:
            raise InvalidRequestError("bad_words", word, "words that have tokens of their own")
        spaced = tuple(tokenizer.encode(f" {bare}", add_special_tokens=False))
        sequences[plain] = None
        if spaced[-len(plain) :] != plain:
            sequences[spaced] = None
    return [list(sequence) for sequence in sequences]
