from __future__ import annotations

import pytest

from octavo.engine.errors import InvalidRequestError
from octavo.engine.text.bad_words import bad_word_token_sequences
from octavo.engine.text.tokenizer import Tokenizer


def test_a_word_is_forbidden_at_the_start_and_after_a_space(packaged: Tokenizer) -> None:
    plain = packaged.encode("Paris", add_special_tokens=False)
    spaced = packaged.encode(" Paris", add_special_tokens=False)
    assert plain != spaced
    assert bad_word_token_sequences(packaged, ["Paris"]) == [plain, spaced]
    assert bad_word_token_sequences(packaged, ["  Paris", "Paris"]) == [plain, spaced]


def test_spellings_of_different_length_are_both_forbidden(smollm2: Tokenizer) -> None:
    plain = smollm2.encode("Copenhagen", add_special_tokens=False)
    spaced = smollm2.encode(" Copenhagen", add_special_tokens=False)
    assert len(plain) != len(spaced)
    assert bad_word_token_sequences(smollm2, ["Copenhagen"]) == [plain, spaced]


def test_a_spelling_that_contains_the_other_is_left_out(smollm2: Tokenizer) -> None:
    seven = smollm2.encode("7", add_special_tokens=False)
    assert smollm2.encode(" 7", add_special_tokens=False)[1:] == seven
    assert bad_word_token_sequences(smollm2, ["7"]) == [seven]


@pytest.mark.parametrize("word", ["", "  "])
def test_a_word_without_tokens_is_refused(smollm2: Tokenizer, word: str) -> None:
    with pytest.raises(InvalidRequestError, match="bad_words"):
        bad_word_token_sequences(smollm2, [word])
