"""Random walks through grammars, over a small vocabulary."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.engine.structured.grammar import compile_grammar, fill_mask
from octavo.engine.structured.params import StructuredOutputsParams
from octavo.engine.text.assistant.formats import FORMATS, format_named
from octavo.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NUM_WORDS = 2_000
MAX_TOKENS = 250
MARKERS = sorted({marker for each in FORMATS for marker in each.markers})
ENDS = (
    "\n</parameter>",
    "</parameter>",
    "</｜DSML｜parameter>",
    "</arg_value>",
    '<|"|>',
    "<escape>",
    '"',
    "'",
)
"""What ends strings."""
BRACKETS = ("}", "]", ")", "}}")
"""What ends other values."""
BEGINS = ('{"name": ', "[get_weather(")


class Vocabulary:
    """The packaged tokenizer's first words, and the markers of all formats as special tokens.

    Attributes:
        tokens: bytes of each.
        specials: ids of the special tokens by their text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = tokenizer.token_bytes
        words = [pieces.piece(i, first=False) for i in range(NUM_WORDS)]
        self.tokens = [*words, *(marker.encode() for marker in MARKERS)]
        self.specials = {text: NUM_WORDS + index for index, text in enumerate(MARKERS)}
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        first = [i for i in tokenizer.special_ids if i < NUM_WORDS]
        self.special_token_ids = sorted({*first, *self.specials.values()})
        self._ids = {words[i]: i for i in range(NUM_WORDS) if i not in first}
        self._longest = max(map(len, self._ids))
        ends = re.compile(rb'\s*(["}\])>/]+|</?\w*|\n)?\s*')
        self.is_closer = np.zeros(len(self.tokens), bool)
        closers = [i for word, i in self._ids.items() if ends.fullmatch(word)]
        self.is_closer[[*closers, self.eos_token_id, *self.specials.values()]] = True

    def __call__(self, text: Any) -> list[int]:
        """Tokens of a text: the longest word each time."""
        data = text if isinstance(text, bytes) else text.encode()
        made = []
        at = 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next(size for size in sizes if data[at : at + size] in self._ids)
            made.append(self._ids[data[at : at + size]])
            at += size
        return made

    def encode(self, text: str, specials: Mapping[str, int]) -> list[int]:
        """Tokens of a text, some of its words as special tokens."""
        pattern = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
        made: list[int] = []
        for part in re.split(f"({pattern})", text) if specials else [text]:
            made += [specials[part]] if part in specials else self(part)
        return made

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return b"".join(self.tokens[i] for i in ids).decode()


def specials_of(name: str, vocabulary: Vocabulary, *, has_specials: bool) -> dict[str, int]:
    """The special tokens of a format's own vocabulary."""
    markers = format_named(name).markers if has_specials else ()
    return {marker: vocabulary.specials[marker] for marker in markers}


def matcher_of(grammar: str, tokens: LLTokenizer, vocabulary: Vocabulary) -> LLMatcher:
    params = StructuredOutputsParams(grammar=grammar)
    return compile_grammar(params, tokens, len(vocabulary.tokens)).matcher.deep_copy()


def walk(
    matcher: LLMatcher,
    vocabulary: Vocabulary,
    rng: random.Random,
    specials: Mapping[str, int],
    first: Sequence[str],
) -> str | None:
    """A random text that the grammar allows; None if it does not end within `MAX_TOKENS`.

    Tokens drawn at random end no free text, so marks are written whole now and then.

    Args:
        matcher: of the grammar, in its first state.
        vocabulary: of the matcher.
        rng: draws.
        specials: ids of the special tokens of the grammar, by their text.
        first: marks with which the text may begin.
    """
    mask = np.zeros(-(-len(vocabulary.tokens) // 32), np.uint32)
    made: list[int] = []
    draws = np.random.default_rng(rng.randrange(2**32))
    begins, quotes, brackets = (
        [vocabulary.encode(text, specials) for text in texts] for texts in (first, ENDS, BRACKETS)
    )
    while len(made) < MAX_TOKENS:
        fill_mask(matcher, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little", count=len(vocabulary.tokens))
        allowed = np.flatnonzero(bits)
        assert len(allowed), f"nothing may follow {vocabulary.decode(made)!r}"
        if bits[vocabulary.eos_token_id] and (len(made) > 40 or rng.random() < 0.2):
            return vocabulary.decode(made)
        if not made and begins and rng.random() < 0.8:
            tried = begins
        else:
            # A string takes brackets, and an object a quote: neither ends the other's like.
            tried = rng.choice([quotes, brackets, []]) if len(made) > 40 else []
            tried = rng.sample(tried, len(tried))
        taken = next((ids for ids in tried if matcher.validate_tokens(ids) == len(ids)), None)
        if taken is None:
            closing = np.flatnonzero(bits & vocabulary.is_closer)
            is_closing = len(closing) > 0 and (len(made) > 40 or rng.random() < 0.5)
            taken = [int(draws.choice(closing if is_closing else allowed))]
            if taken == [vocabulary.eos_token_id]:
                return vocabulary.decode(made)
        assert matcher.consume_tokens(taken), (matcher.get_error(), vocabulary.decode(made))
        made += taken
    return None
