"""What a tokenizer source, of whatever format, has to yield."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers

from octavo.engine.errors import NOT_FAILURES, ModelLoadError, shorten

END_OF_TURN_TOKENS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end|>")
"""Special tokens that end an assistant's turn; a vocabulary that has one always stops at it."""
HARMONY_ENDS = ("<|return|>", "<|call|>")
"""In a vocabulary that has both (gpt-oss) these end a turn, and "<|end|>" one of its messages."""

IDS_PER_TOKEN, SPARE_IDS = 4, 1 << 16
"""A vocabulary may skip ids, but not many: things are built with an entry for each id."""


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
        model_type: the model's family, if the source names it.
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    affixes: tuple[tuple[int, ...], tuple[int, ...]] | None
    chat_template: str | None
    named_tokens: dict[str, str] = field(default_factory=dict)
    model_type: str = ""


def special_token_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the added tokens that are marked special."""
    added = backend.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def with_end_of_turn(
    backend: tokenizers.Tokenizer, stated: Iterable[int], special_ids: frozenset[int]
) -> tuple[int, ...]:
    """The stated end-of-sequence ids, then those of end-of-turn tokens, each once."""
    is_harmony = all(backend.token_to_id(token) is not None for token in HARMONY_ENDS)
    turns = map(backend.token_to_id, HARMONY_ENDS if is_harmony else END_OF_TURN_TOKENS)
    found = (token_id for token_id in turns if token_id is not None and token_id in special_ids)
    return tuple(dict.fromkeys((*stated, *found)))


def vocabulary_size(backend: tokenizers.Tokenizer) -> int:
    """One more than the largest id of a vocabulary.

    Raises:
        ModelLoadError: the id is out of all proportion to the number of tokens.
    """
    ids = backend.get_vocab(with_added_tokens=True).values()
    largest = max(ids, default=-1)
    highest = IDS_PER_TOKEN * len(ids) + SPARE_IDS
    if largest > highest:
        raise ModelLoadError(
            f"the token id {largest} is not allowed: at most {highest} in a vocabulary of "
            f"{len(ids)} tokens"
        )
    return largest + 1


@contextmanager
def refusing_what_fails(where: str) -> Iterator[None]:
    """Turns whatever the tokenizer libraries raise into one kind of error.

    They raise bare exceptions, and a panic of their Rust code is not even that.

    Args:
        where: what is being read.

    Raises:
        ModelLoadError: in place of any other error, but of those that end the process.
    """
    try:
        yield
    except (ModelLoadError, *NOT_FAILURES):
        raise
    except BaseException as error:
        raise ModelLoadError(f"{where}: {shorten(str(error), 300)}") from error
