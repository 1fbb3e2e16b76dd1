"""What the files of Sentence Transformers say of pooling, and what of it is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.engine.errors import ModelLoadError, UnsupportedModelError
from octavo.models.loading.sentence_transformers import read_pooling
from octavo.models.pooling_config import PoolingConfig

OLD = "sentence_transformers.models"
MODES = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")


def write(directory: Path, files: dict[str, Any]) -> Path:
    for name, values in ({"config.json": {"architectures": ["Qwen3ForCausalLM"]}} | files).items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(values if isinstance(values, str) else json.dumps(values))
    return directory


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {
            "idx": index, "name": str(index), "type": kind,
            "path": "" if kind.endswith("Transformer") else f"{index}_{kind.rpartition('.')[2]}",
        }
        for index, kind in enumerate(kinds)
    ]  # fmt: skip


def mode(name: str, **more: Any) -> dict[str, Any]:
    flags = {f"pooling_mode_{each}": each == name for each in MODES}
    return {"word_embedding_dimension": 32, **flags, "include_prompt": True, **more}


WHOLE = modules(f"{OLD}.Transformer", f"{OLD}.Pooling", f"{OLD}.Normalize")


def test_a_checkpoint_that_says_nothing_is_pooled_as_any_causal_model(tmp_path):
    assert read_pooling(write(tmp_path, {})) == PoolingConfig(
        pooling="last", normalize=True, is_declared=False
    )


@pytest.mark.parametrize(
    ("name", "pooling"), [("cls_token", "cls"), ("mean_tokens", "mean"), ("lasttoken", "last")]
)
@pytest.mark.parametrize("normalize", [True, False])
def test_modules_say_how_to_pool(tmp_path, name, pooling, normalize):
    files = {"modules.json": WHOLE[: 2 + normalize], "1_Pooling/config.json": mode(name)}
    found = read_pooling(write(tmp_path, files))
    assert found == PoolingConfig(pooling=pooling, normalize=normalize, is_declared=True)


@pytest.mark.parametrize("named", ["mean", ["mean"]])
def test_a_pooling_may_be_named_in_the_newer_way(tmp_path, named):
    files = {"modules.json": WHOLE, "1_Pooling/config.json": {"pooling_mode": named}}
    assert read_pooling(write(tmp_path, files)).pooling == "mean"


def test_prompts_go_by_name(tmp_path):
    prompts = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": "query"}
    found = read_pooling(write(tmp_path, {"config_sentence_transformers.json": prompts}))
    assert found.prompts == {"query": "Query: ", "document": ""}
    assert found.default_prompt == "query"


@pytest.mark.parametrize(
    ("architecture", "generates"), [("Qwen3Model", False), ("Qwen3ForCausalLM", True)]
)
def test_a_model_without_an_output_layer_is_made_for_embeddings(tmp_path, architecture, generates):
    found = read_pooling(write(tmp_path, {"config.json": {"architectures": [architecture]}}))
    assert (found.generates, found.is_declared) == (generates, not generates)


POOLED = {"modules.json": WHOLE, "1_Pooling/config.json": mode("mean_tokens")}
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "a dense layer": (
        {"modules.json": modules(f"{OLD}.Transformer", f"{OLD}.Pooling", f"{OLD}.Dense")},
        "Dense",
    ),
    "a sparse head": (
        {"modules.json": modules(f"{OLD}.Transformer", f"{OLD}.SpladePooling")},
        "Sp",
    ),
    "no pooling": ({"modules.json": modules(f"{OLD}.Transformer")}, "names no Pooling"),
    "a pooling first": ({"modules.json": modules(f"{OLD}.Pooling")}, "module 0"),
    "the maximum": ({"1_Pooling/config.json": mode("max_tokens")}, "max_tokens"),
    "two poolings": (
        {"1_Pooling/config.json": mode("lasttoken", pooling_mode_mean_tokens=True)},
        "mean_tokens",
    ),
    "none": ({"1_Pooling/config.json": {}}, "pooling mode"),
    "a mean without prompts": (
        {
            "1_Pooling/config.json": mode("mean_tokens", include_prompt=False),
            "config_sentence_transformers.json": {"prompts": {"query": "Query: "}},
        },
        "include_prompt",
    ),
    "messages": (
        {"sentence_bert_config.json": {"modality_config": {"text": {}, "message": {}}}},
        "modality_config",
    ),
    "small letters": ({"sentence_bert_config.json": {"do_lower_case": True}}, "do_lower_case"),
}
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"modules.json": {}}, "a list"),
    "too many": ({"modules.json": WHOLE * 3}, "at most 8"),
    "no JSON": ({"modules.json": "["}, "modules.json"),
    "numbers": ({"modules.json": [1, 2]}, "a list"),
    "another folder": (
        {"modules.json": [WHOLE[0], WHOLE[1] | {"path": "../1_Pooling"}]},
        "a folder inside",
    ),
    "no folder": ({"modules.json": [WHOLE[0], WHOLE[1] | {"path": None}]}, "a folder inside"),
    "prompts that are no texts": (
        {"config_sentence_transformers.json": {"prompts": {"query": 3}}},
        "prompts",
    ),
    "no length": ({"sentence_bert_config.json": {"max_seq_length": 0}}, "max_seq_length = 0"),
    "a length in words": (
        {"sentence_bert_config.json": {"max_seq_length": "512"}},
        "max_seq_length",
    ),
    "another default": (
        {"config_sentence_transformers.json": {"prompts": {}, "default_prompt_name": "query"}},
        "default_prompt_name",
    ),
}


@pytest.mark.parametrize("longest", [1, 512, None])
def test_a_length_at_which_texts_are_cut_is_read(tmp_path, longest):
    files = POOLED | {"sentence_bert_config.json": {"max_seq_length": longest}}
    assert read_pooling(write(tmp_path, files)).max_seq_length == longest


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_what_is_not_served_is_refused_by_name(tmp_path, case):
    files, words = UNSUPPORTED[case]
    with pytest.raises(UnsupportedModelError, match=words):
        read_pooling(write(tmp_path, POOLED | files))


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_is_refused_by_name(tmp_path, case):
    files, words = MALFORMED[case]
    with pytest.raises(ModelLoadError, match=words):
        read_pooling(write(tmp_path, POOLED | files))
