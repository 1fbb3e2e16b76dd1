"""What tests of grammars share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from octavo.engine.text.tokenizer import Tokenizer
from tests.engine.text.assistant.walks import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@pytest.fixture(scope="module")
def vocabulary(smollm2: Tokenizer) -> Vocabulary:
    return Vocabulary(smollm2)


@pytest.fixture(scope="module")
def tokens(vocabulary: Vocabulary) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(vocabulary),
        n_vocab=len(vocabulary.tokens),
        eos_token=[vocabulary.eos_token_id],
    )
