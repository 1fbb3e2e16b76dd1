"""Text to tokens and back for whoever asks: of any length up to a stated one, beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.engine.errors import InvalidRequestError
from octavo.engine.sampling_params import are_plain_integers

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

MAX_TOKENIZE_CHARS = 1024 * 1024
MAX_DETOKENIZE_IDS = 262_144


async def tokenize_text(
    engine: AsyncEngine, name: str, text: str, *, add_special_tokens: bool
) -> list[int]:
    """The tokens of a text, which need not fit the model's context.

    Args:
        name: what the client calls the text.

    Raises:
        InvalidRequestError: it is too long, or cannot be tokenized.
    """
    if len(text) > MAX_TOKENIZE_CHARS:
        allowed = f"at most {MAX_TOKENIZE_CHARS} characters"
        raise InvalidRequestError(name, f"{len(text)} characters", allowed)
    return await engine.tokenize(text, add_special_tokens=add_special_tokens, is_cut=True)


async def detokenize_ids(
    engine: AsyncEngine, name: str, token_ids: Sequence[int], *, skip_special_tokens: bool
) -> str:
    """The text of token ids.

    Args:
        name: what the client calls them.

    Raises:
        InvalidRequestError: they are too many, or one is not in the vocabulary.
    """
    if len(token_ids) > MAX_DETOKENIZE_IDS:
        allowed = f"at most {MAX_DETOKENIZE_IDS}"
        raise InvalidRequestError(name, f"{len(token_ids)} ids", allowed)
    ids, last = list(token_ids), engine.model_config.vocab_size - 1
    if not are_plain_integers(ids, 0, last):
        bad = next(token_id for token_id in ids if not 0 <= token_id <= last)
        raise InvalidRequestError(name, bad, f"ids from 0 to {last}")
    return await asyncio.to_thread(
        engine.tokenizer.decode, ids, skip_special_tokens=skip_special_tokens
    )
