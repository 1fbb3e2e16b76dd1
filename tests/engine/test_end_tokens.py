"""Which tokens end a text, of those that tokenizer and model name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from octavo.engine.engine import _eos_token_ids
from octavo.engine.errors import ModelLoadError
from octavo.engine.sampling_params import MAX_STOP_IDS
from octavo.models.config import MAX_EOS_TOKENS, ModelConfig
from octavo.models.flat_config import flat_config


def model(*eos: int) -> ModelConfig:
    return flat_config(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, eos_token_ids=eos,
    )  # fmt: skip


def tokenizer(*eos: int) -> Any:
    return SimpleNamespace(eos_token_ids=eos)


def test_those_of_both_count_once_and_the_main_one_is_first() -> None:
    assert _eos_token_ids(tokenizer(3, 5), model(5, 7)) == (3, 5, 7)


def test_tokens_that_the_model_cannot_produce_end_nothing() -> None:
    assert _eos_token_ids(tokenizer(3, 32, 2**31 - 1), model(3)) == (3,)


def test_more_than_a_row_has_room_for_are_refused() -> None:
    ids = range(MAX_STOP_IDS)
    assert len(_eos_token_ids(tokenizer(*ids), model())) == MAX_STOP_IDS == MAX_EOS_TOKENS
    with pytest.raises(ModelLoadError, match="at most 24 token ids"):
        _eos_token_ids(tokenizer(*ids), model(MAX_STOP_IDS))
