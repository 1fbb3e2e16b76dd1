"""The tokens at which a generation ends, beside those that a model's files state."""

from __future__ import annotations

import pytest
import tokenizers

from octavo.engine.text.tokenizer_parts import special_token_ids, with_end_of_turn


@pytest.mark.parametrize(
    ("special", "ends"),
    [
        (["<|im_end|>"], ["<|im_end|>"]),
        (["<|eot_id|>", "<|eom_id|>"], ["<|eot_id|>", "<|eom_id|>"]),
        (["<|end|>", "<|user|>"], ["<|end|>"]),
        (["<|end|>", "<|return|>"], ["<|end|>"]),
        # gpt-oss goes on after a thought's <|end|>, to its call or its answer.
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        ([], []),
    ],
)
def test_turns_end_at_the_tokens_of_their_kind(special: list[str], ends: list[str]) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, "a"))
    backend.add_special_tokens(special)
    found = with_end_of_turn(backend, [1], special_token_ids(backend))
    assert [backend.id_to_token(token_id) for token_id in found] == ["<eos>", *ends]


def test_a_word_is_no_end() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<|end|>": 1}, "a"))
    assert with_end_of_turn(backend, [], special_token_ids(backend)) == ()
