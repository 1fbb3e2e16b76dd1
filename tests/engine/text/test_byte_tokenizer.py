"""A token a byte, for a model without a tokenizer."""

from __future__ import annotations

import pytest

from octavo.engine.errors import ModelLoadError
from octavo.engine.text.byte_tokenizer import byte_tokenizer
from octavo.engine.text.tokenizer import Tokenizer


def test_every_byte_is_a_token() -> None:
    tokenizer = Tokenizer(byte_tokenizer(256))
    text = "a\u00e9\u2028 \U0001f600\x00"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == 256


def test_a_vocabulary_of_fewer_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="vocab_size = 255 is not allowed without a tokenizer"):
        byte_tokenizer(255)
