"""What a tokenizer source, of whatever format, has to yield."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import tokenizers

END_OF_TURN_TOKENS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>")
"""Special tokens that end an assistant's turn; a vocabulary that has one always stops at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """A tokenizer as read from its files.

    Attributes:
        backend: text to ids, special tokens marked, no truncation, no padding.
        vocab_size: one more than the largest id.
        bos_token_id: the beginning-of-sequence token, if there is one.
        eos_token_ids: the tokens that end a generation, the main one first.
        special_ids: ids of special (control) tokens.
        affixes: ids put before and after every encoded text; None leaves it to the backend's
            own post-processor.
        chat_template: Jinja source, if the model has one.
        named_tokens: "bos_token", "eos_token", … -> text, as templates use them.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    affixes: tuple[tuple[int, ...], tuple[int, ...]] | None
    chat_template: str | None
    named_tokens: dict[str, str] = field(default_factory=dict)


def special_token_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the added tokens that are marked special."""
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def with_end_of_turn(
    backend: tokenizers.Tokenizer, stated: Iterable[int], special_ids: frozenset[int]
) -> tuple[int, ...]:
    """The stated end-of-sequence ids, then those of end-of-turn tokens, each once."""
    turns = (backend.token_to_id(token) for token in END_OF_TURN_TOKENS)
    found = (token_id for token_id in turns if token_id is not None and token_id in special_ids)
    return tuple(dict.fromkeys((*stated, *found)))
