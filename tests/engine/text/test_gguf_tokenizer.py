from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.engine.text.pre_tokenizers import BYTE_LEVEL_KINDS
from octavo.engine.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize(
    ("fixture", "golden"), [("smollm2", "smollm2-135m"), ("gemma3", "gemma3-270m")]
)
def test_tokens_and_text_equal_those_of_transformers(
    request: pytest.FixtureRequest, fixture: str, golden: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    rows = json.loads((GOLDEN / f"{golden}.json").read_text("utf-8"))
    assert len(rows) > 300
    for row in rows:
        text, ids = row["text"], row["ids"]
        assert tokenizer.encode(text) == ids, repr(text)
        assert tokenizer.decode(ids) == row.get("decoded", text), repr(text)
        with_special = tokenizer.decode(ids, skip_special_tokens=False)
        assert with_special == row.get("decoded_with_special", text), repr(text)


def test_smollm2_is_described_by_its_file(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.id_to_token(2) == "<|im_end|>"
    assert smollm2.encode("Hello") == smollm2.encode("Hello", add_special_tokens=False)


def test_gemma3_begins_with_bos_and_stops_at_the_end_of_a_turn(gemma3: Tokenizer) -> None:
    assert gemma3.vocab_size == 262144
    assert gemma3.encode("Hello") == [2, *gemma3.encode("Hello", add_special_tokens=False)]
    assert [gemma3.id_to_token(index) for index in gemma3.eos_token_ids] == [
        "<eos>",
        "<end_of_turn>",
    ]
    assert gemma3.chat_template is None


def test_sentencepiece_merges_the_best_scored_neighbours_first(
    llama_metadata: dict[str, Any],
) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(llama_metadata)
    # "ab" (-1) is better than "bc" (-2), so "▁abc" is ▁ab + c and not ▁a + bc.
    tokens = [tokenizer.id_to_token(index) for index in tokenizer.encode("abc")]
    assert tokens == ["<s>", "▁ab", "c"]
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert tokenizer.decode(tokenizer.encode(" abc")) == " abc"


def test_characters_outside_a_sentencepiece_vocabulary_become_bytes(
    llama_metadata: dict[str, Any],
) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(llama_metadata)
    tokens = [tokenizer.id_to_token(index) for index in tokenizer.encode("€")]
    assert tokens == ["<s>", "▁", "<0xE2>", "<0x82>", "<0xAC>"]
    assert tokenizer.decode(tokenizer.encode("a€b")) == "a€b"


def test_flags_say_what_is_put_around_a_text(llama_metadata: dict[str, Any]) -> None:
    llama_metadata["tokenizer.ggml.add_bos_token"] = False
    llama_metadata["tokenizer.ggml.add_eos_token"] = True
    llama_metadata["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = Tokenizer.from_gguf_metadata(llama_metadata)
    assert [tokenizer.id_to_token(index) for index in tokenizer.encode("a")] == ["a", "</s>"]


def test_added_tokens_are_found_whole_and_only_control_ones_are_special(
    byte_level_metadata: dict[str, Any],
) -> None:
    tokenizer = Tokenizer.from_gguf_metadata(byte_level_metadata)
    assert tokenizer.encode("ab<tool> ab<|end|>") == [7, 1, 8, 0]
    assert tokenizer.special_ids == {0, 11}
    assert tokenizer.decode([7, 1, 8, 0]) == "ab<tool> ab"
    assert tokenizer.decode([7, 1, 8, 0], skip_special_tokens=False) == "ab<tool> ab<|end|>"
    assert tokenizer.eos_token_ids == (0, 11)


@pytest.mark.parametrize(
    ("pre", "ids"),
    [
        ("gpt-2", [2, 6, 6, 9]),
        ("smollm", [2, 10, 4, 5]),
        ("qwen2", [2, 6, 6, 4, 5]),
        ("llama-bpe", [2, 6, 6, 9]),
    ],
)
def test_the_named_pre_tokenizer_cuts_spaces_and_digits(
    byte_level_metadata: dict[str, Any], pre: str, ids: list[int]
) -> None:
    byte_level_metadata["tokenizer.ggml.pre"] = pre
    byte_level_metadata["tokenizer.ggml.bos_token_id"] = 0
    byte_level_metadata["tokenizer.ggml.add_bos_token"] = False
    assert Tokenizer.from_gguf_metadata(byte_level_metadata).encode("a  12") == ids


def test_llama3_files_that_do_not_say_begin_with_bos(byte_level_metadata: dict[str, Any]) -> None:
    byte_level_metadata["tokenizer.ggml.pre"] = "llama-bpe"
    byte_level_metadata["tokenizer.ggml.bos_token_id"] = 1
    assert Tokenizer.from_gguf_metadata(byte_level_metadata).encode("a") == [1, 2]


@pytest.mark.parametrize("pre", BYTE_LEVEL_KINDS)
def test_every_pre_tokenizer_keeps_all_of_the_text(
    byte_level_metadata: dict[str, Any], pre: str
) -> None:
    kind = BYTE_LEVEL_KINDS[pre]
    text = "I'M 12345 naïve\r\n\n  日本 😀!? x\t "
    pieces = kind.pre_tokenizer().pre_tokenize_str(text)
    assert [span[0] for _, span in pieces[1:]] == [span[1] for _, span in pieces[:-1]]
    assert pieces[-1][1][1] == len(text)


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("model", None, "tokenizer.ggml.model"),
        ("tokens", None, "tokenizer.ggml.tokens"),
        ("tokens", [1, 2], "tokenizer.ggml.tokens"),
        ("token_type", [1], "tokenizer.ggml.token_type"),
        ("merges", None, "tokenizer.ggml.merges"),
        ("merges", ["ab"], "tokenizer.ggml.merges"),
        ("merges", ["x y"], "tokenizer.ggml"),
        ("eos_token_id", 12, "tokenizer.ggml.eos_token_id"),
        ("bos_token_id", -1, "tokenizer.ggml.bos_token_id"),
        ("bos_token_id", "1", "tokenizer.ggml.bos_token_id"),
        ("add_bos_token", 1, "tokenizer.ggml.add_bos_token"),
    ],
)
def test_damaged_metadata_is_refused_by_name(
    byte_level_metadata: dict[str, Any], key: str, value: Any, names: str
) -> None:
    byte_level_metadata[f"tokenizer.ggml.{key}"] = value
    if value is None:
        del byte_level_metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelLoadError, match=names):
        Tokenizer.from_gguf_metadata(byte_level_metadata)


def test_sentencepiece_without_scores_is_refused(llama_metadata: dict[str, Any]) -> None:
    del llama_metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.scores"):
        Tokenizer.from_gguf_metadata(llama_metadata)


@pytest.mark.parametrize(("key", "value"), [("model", "t5"), ("pre", "no-such-kind")])
def test_unknown_kinds_are_refused_by_name(
    byte_level_metadata: dict[str, Any], key: str, value: str
) -> None:
    byte_level_metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(UnsupportedModelError, match=value):
        Tokenizer.from_gguf_metadata(byte_level_metadata)


@pytest.mark.parametrize("metadata", ["llama_metadata", "byte_level_metadata"])
def test_saved_files_give_the_same_tokens_here_and_in_transformers(
    metadata: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    own = request.getfixturevalue(metadata) | {"tokenizer.chat_template": "{{ messages[0] }}"}
    tokenizer = Tokenizer.from_gguf_metadata(own)
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path))
    again = Tokenizer.from_source(tmp_path)
    for text in ("ab", "a b 12", "abc<|im_end|>ab"):
        assert theirs(text)["input_ids"] == again.encode(text) == tokenizer.encode(text)
    assert again.eos_token_ids == tokenizer.eos_token_ids
    assert again.chat_template == theirs.chat_template == tokenizer.chat_template
