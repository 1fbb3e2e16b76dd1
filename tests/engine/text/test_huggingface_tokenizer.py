from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.engine.text.tokenizer import Tokenizer

TEXTS = ["", "ab", " ab 12", "aab<|im_end|>ab", "<s>ab</s>", "x ab", "a<think>b"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A byte-level model directory whose tokenizer.json itself puts <s> in front."""
    characters = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {char: index for index, char in enumerate([*characters, "ab", "Ġab"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "ab")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    _write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    return tmp_path


def _write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(json.dumps(content), "utf-8")


def test_the_post_processor_decides_where_the_configuration_is_silent(directory: Path) -> None:
    tokenizer = Tokenizer.from_source(directory)
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("ab") == [bos, *tokenizer.encode("ab", add_special_tokens=False)]
    assert tokenizer.decode(tokenizer.encode("x ab é😀")) == "x ab é😀"


def test_stored_truncation_is_not_applied(directory: Path) -> None:
    assert len(Tokenizer.from_source(directory).encode("x" * 50)) == 51


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"added_tokens_decoder": {"262": {"content": "<new>", "special": True}}},
    ],
)
def test_tokens_equal_those_of_transformers(directory: Path, config: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer_config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **config,
    }
    _write(directory, "tokenizer_config.json", tokenizer_config)
    stored = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    _write(directory, "tokenizer.json", {**stored, "truncation": None})
    theirs = PreTrainedTokenizerFast.from_pretrained(str(directory))
    ours = Tokenizer.from_source(directory)
    for text in [*TEXTS, "a<new>b"]:
        assert ours.encode(text) == theirs.encode(text), text
        ids = theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


def test_every_stated_end_of_sequence_id_counts(directory: Path) -> None:
    _write(directory, "generation_config.json", {"eos_token_id": [5, 7]})
    tokenizer = Tokenizer.from_source(directory)
    end, turn = tokenizer.token_to_id("</s>"), tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.eos_token_ids == (end, 5, 7, turn)


def test_named_tokens_of_the_special_map_are_special(directory: Path) -> None:
    _write(directory, "tokenizer_config.json", {})
    _write(directory, "special_tokens_map.json", {"eos_token": {"content": "ab"}})
    tokenizer = Tokenizer.from_source(directory)
    ab = tokenizer.token_to_id("ab")
    assert tokenizer.eos_token_ids[0] == ab
    assert tokenizer.decode([ab, ab]) == ""


def test_the_chat_template_file_goes_before_the_configuration(directory: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    template = "{{ bos_token }}old {{ messages[0].content }}"
    listed = [{"name": "tools", "template": "t"}, {"name": "default", "template": template}]
    _write(directory, "tokenizer_config.json", {"bos_token": "<s>", "chat_template": listed})
    assert Tokenizer.from_source(directory).apply_chat_template(messages) == "<s>old hi"
    (directory / "chat_template.jinja").write_text("new {{ messages[0].content }}", "utf-8")
    tokenizer = Tokenizer.from_source(directory)
    assert tokenizer.apply_chat_template(messages) == "new hi"
    assert tokenizer.encode_chat(messages) == tokenizer.encode("new hi", add_special_tokens=False)


def test_a_template_may_lie_where_processors_keep_it(directory: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _write(directory, "chat_template.json", {"chat_template": "kept {{ messages[0].content }}"})
    assert Tokenizer.from_source(directory).apply_chat_template(messages) == "kept hi"
    _write(directory, "tokenizer_config.json", {"chat_template": "own {{ messages[0].content }}"})
    assert Tokenizer.from_source(directory).apply_chat_template(messages) == "own hi"


def test_without_tokenizer_json_transformers_converts_the_files(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]
    target = tmp_path_factory.mktemp("old")
    _write(target, "vocab.json", {**source["vocab"], "<|endoftext|>": len(source["vocab"])})
    merges = "\n".join(" ".join(pair) for pair in source["merges"])
    (target / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", "utf-8")
    _write(target, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    _write(target, "config.json", {"model_type": "gpt2"})
    tokenizer = Tokenizer.from_source(target)
    expected = Tokenizer.from_source(directory).encode("ab ab", add_special_tokens=False)
    assert tokenizer.encode("ab ab") == expected


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_damaged_files_are_refused_by_name(directory: Path, name: str) -> None:
    (directory / name).write_text('{"model": ', "utf-8")
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_source(directory)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {"content": "ab"}}}, "'ab'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"9": {}}}, "no content"),
        ("tokenizer_config.json", [], "JSON object"),
    ],
)
def test_contradictions_are_refused(directory: Path, name: str, content: Any, says: str) -> None:
    _write(directory, name, content)
    with pytest.raises(ModelLoadError, match=says):
        Tokenizer.from_source(directory)


def test_a_decoder_without_bytes_for_each_token_is_refused(directory: Path) -> None:
    stored = json.loads((directory / "tokenizer.json").read_text("utf-8"))
    stored["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    _write(directory, "tokenizer.json", stored)
    with pytest.raises(UnsupportedModelError, match="BPEDecoder"):
        Tokenizer.from_source(directory)


def test_a_missing_source_is_refused(directory: Path) -> None:
    with pytest.raises(ModelLoadError, match="neither"):
        Tokenizer.from_source(directory / "nowhere")
    shutil.rmtree(directory)
    directory.mkdir()
    with pytest.raises(ModelLoadError, match="no tokenizer"):
        Tokenizer.from_source(directory)


@pytest.mark.parametrize(
    "text",
    [
        '{"model_max_length": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"eos_token": "\\ud800"}',
        '{"chat_template": "\\udfff"}',
        '{"added_tokens_decoder": {"' + "9" * 5000 + '": {"content": "x"}}}',
    ],
)
def test_a_configuration_that_nothing_can_handle_is_refused(directory: Path, text: str) -> None:
    (directory / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        Tokenizer.from_source(directory)


def test_many_added_tokens_are_added_at_once(directory: Path) -> None:
    first = Tokenizer.from_source(directory).vocab_size
    listed = {str(first + i): {"content": f"<extra {i}>", "special": True} for i in range(20_000)}
    _write(directory, "tokenizer_config.json", {"added_tokens_decoder": listed})
    tokenizer = Tokenizer.from_source(directory)
    assert tokenizer.token_to_id("<extra 19999>") == first + 19_999


def test_ids_that_skip_a_few_numbers_are_taken(directory: Path) -> None:
    document = json.loads((directory / "tokenizer.json").read_text())
    document["model"]["vocab"]["Ġab"] = 5000
    _write(directory, "tokenizer.json", document)
    assert Tokenizer.from_source(directory).vocab_size == 5001
    document["model"]["vocab"]["Ġab"] = 2**32 - 1
    _write(directory, "tokenizer.json", document)
    with pytest.raises(ModelLoadError, match="the token id 4294967295 is not allowed"):
        Tokenizer.from_source(directory)
