"""Tokenizers of the packaged models and tiny ones made up on the spot."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.engine.text.tokenizer import Tokenizer
from octavo.models.packaged import PACKAGED_MODELS


def _packaged(name: str) -> Tokenizer:
    model = PACKAGED_MODELS[name]
    if not model.is_installed():
        pytest.skip(f"{name} is not installed")
    return Tokenizer.from_source(model.path())


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return _packaged("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3() -> Tokenizer:
    return _packaged("gemma3-270m")


@pytest.fixture(params=["smollm2", "gemma3"], scope="session")
def packaged(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


@pytest.fixture
def llama_metadata() -> dict[str, Any]:
    """SentencePiece style: bytes, letters, and a few merged tokens with scores."""
    control = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "abc"]
    scores = [0.0] * 4 + [-1.0, -2.0, -3.0, -4.0, -5.0]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*control, *byte_tokens, *pieces],
        "tokenizer.ggml.scores": [0.0] * 259 + scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture
def byte_level_metadata() -> dict[str, Any]:
    """GPT-2 style: a few letters and merges, one control and one user-defined token."""
    tokens = ["<|end|>", "<tool>", "a", "b", "1", "2", "Ġ", "ab", "Ġab", "12", "ĠĠ", "<|im_end|>"]
    return {
        "general.architecture": "qwen2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4, *[1] * 9, 3],
        "tokenizer.ggml.merges": ["a b", "Ġ ab", "1 2", "Ġ Ġ"],
        "tokenizer.ggml.eos_token_id": 0,
    }
