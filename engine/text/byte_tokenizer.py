"""A tokenizer for a model whose own is not at hand: one token a byte."""

from __future__ import annotations

import tokenizers

from octavo.engine.errors import ModelLoadError
from octavo.engine.text.tokenizer_parts import TokenizerParts

NUM_BYTES = 256


def byte_tokenizer(vocab_size: int) -> TokenizerParts:
    """Tokens 0 to 255 are the bytes of a text; the others of a model's stand for none.

    Raises:
        ModelLoadError: the model has fewer tokens.
    """
    if vocab_size < NUM_BYTES:
        raise ModelLoadError(
            f"vocab_size = {vocab_size} is not allowed without a tokenizer: at least {NUM_BYTES}, "
            "one token a byte"
        )
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: token for token, character in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return TokenizerParts(
        backend=backend,
        vocab_size=NUM_BYTES,
        bos_token_id=None,
        eos_token_ids=(),
        special_ids=frozenset(),
        affixes=None,
        chat_template=None,
    )
