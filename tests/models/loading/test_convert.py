"""A converted checkpoint holds the numbers of its source, and is hardly larger."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from octavo.engine.errors import InvalidConfigError, ModelLoadError, UnsupportedModelError
from octavo.models.loading.convert import convert
from octavo.models.loading.load import load_model, open_model
from octavo.models.loading.locate import locate
from octavo.models.loading.orbax import read_config
from octavo.sharding.mesh import make_mesh
from tests.models.loading.stored.test_mxfp4 import packed
from tests.models.loading.stored.writers import FORMATS, quantized, write_safetensors

MORE_BYTES = 4096
"""What the padding of a header may take, and files in place of one."""
SOME = ("fp8 in blocks", "packed 4 bits by group", "awq", "gptq of 4 bits", "nvfp4", "nf4")
KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.fixture
def write(tmp_path: Path, tiny_values: Any, tiny_tensors: Any) -> Callable[..., Path]:
    """A directory of a tiny model in a format, or of tensors."""

    def make(model: str, name: str | None, tensors: Any = None, **changes: Any) -> Path:
        directory = tmp_path / "source"
        directory.mkdir()
        if model == "tied":
            model, changes = "llama", {"tie_word_embeddings": True}
            tensors = {
                key: x for key, x in tiny_tensors("llama").items() if key != "lm_head.weight"
            }
        stored = tiny_tensors(model) if tensors is None else tensors
        values = tiny_values(model) | changes
        if name is not None:
            stored, _ = quantized(name, stored)
            values["quantization_config"] = FORMATS[name][0]
        (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
        write_safetensors(directory / "model.safetensors", stored)
        return directory

    return make


def num_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)


@pytest.mark.parametrize("name", [None, "awq"])
def test_a_place_that_cannot_be_written_to_is_said_before_the_model_is_read(
    write: Callable[..., Path], tmp_path: Path, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.models.loading.convert.load_model", lambda *_: pytest.fail("read"))
    file = tmp_path / "file"
    file.touch()
    source = write("llama", name)
    with pytest.raises(InvalidConfigError, match=r"DST = .*that can be written to \(Not a dir"):
        convert(source, file / "within")
    if os.geteuid():  # root may write anywhere
        (locked := tmp_path / "locked").mkdir(mode=0o555)
        with pytest.raises(InvalidConfigError, match=r"DST = .*written to \(Permission denied"):
            convert(source, locked)


def test_what_cannot_be_written_to_the_end_is_an_error_of_the_model(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: no space left on device")

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.save", fail)
    with pytest.raises(ModelLoadError, match=r"weights cannot be written: RESOURCE_EXHAUSTED"):
        convert(write("llama", None), tmp_path / "target")


def assert_same(source: Path, target: Path, dtype: str = "float32", size: int = 1) -> None:
    """The same weights, and the same blocks beside them."""
    want = load_model(source, dtype, make_mesh(size))
    found = load_model(target, dtype, make_mesh(size))
    jax.tree.map(np.testing.assert_array_equal, found.weights, want.weights)
    assert found.config.layers == want.config.layers
    blocks = [open_model(path, dtype).block_quantized for path in (source, target)]
    trees = [None if each is None else each.read() for each in blocks]
    jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, "llama") for name in FORMATS]
    + [(name, model) for name in SOME for model in ("tied", "qwen3_moe")],
)
def test_few_bits_stay_few(
    name: str, model: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    source, target = write(model, name), tmp_path / "target"
    assert convert(source, target) == "safetensors"
    assert num_bytes(target) <= num_bytes(source) + MORE_BYTES
    assert_same(source, target)
    if model == "qwen3_moe":
        again = tmp_path / "again"
        assert convert(target, again) == "safetensors"
        assert_same(source, again, "bfloat16", size=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["llama", "gemma2", "qwen3_moe"])
def test_a_gguf_file_stays_one(kind: str, model: str, tiny_gguf: Any, tmp_path: Path) -> None:
    source = tiny_gguf(model, kind=gguf.GGMLQuantizationType[kind])
    target = tmp_path / "target"
    assert convert(source, target) == "gguf"
    assert locate(target) == (target / source.name, "gguf")
    assert num_bytes(target) == num_bytes(source)
    assert_same(source, target)


def test_experts_in_mxfp4_and_modelopts_own_file_are_kept(
    write: Callable[..., Path], tiny_tensors: Any, tiny_values: Any, tmp_path: Path
) -> None:
    small, _ = packed(tiny_tensors("gpt_oss"))
    source = write("gpt_oss", None, small, quantization_config={"quant_method": "mxfp4"})
    convert(source, tmp_path / "target")
    assert num_bytes(tmp_path / "target") <= num_bytes(source) + MORE_BYTES
    assert_same(source, tmp_path / "target")

    stored, _ = quantized("nvfp4", tiny_tensors("llama"))
    write_safetensors(source / "model.safetensors", stored)
    (source / "config.json").write_text(json.dumps(tiny_values("llama")))
    said = {"quantization": {"quant_algo": "NVFP4"}}
    (source / "hf_quant_config.json").write_text(json.dumps(said))
    assert convert(source, tmp_path / "own") == "safetensors"
    assert_same(source, tmp_path / "own")


def test_what_the_text_model_does_not_read_is_left_out(
    write: Callable[..., Path], tiny_tensors: Any, tiny_values: Any, tmp_path: Path
) -> None:
    stored, _ = quantized("awq", tiny_tensors("gemma3"))
    moved = {name.replace("model.", "language_model.model.", 1): x for name, x in stored.items()}
    moved["vision_tower.embeddings.weight"] = np.ones((512, 512), np.float32)
    source = write("gemma3", None, moved)
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    text = tiny_values("gemma3") | {"quantization_config": FORMATS["awq"][0]}
    (source / "config.json").write_text(json.dumps(values | {"text_config": text}))
    target = tmp_path / "target"
    assert convert(source, target) == "safetensors"
    assert num_bytes(target) < num_bytes(source) - 512 * 512 * 4 + MORE_BYTES
    assert_same(source, target)


def test_files_of_a_cache_of_links_are_written_under_names_of_their_own(
    write: Callable[..., Path], tiny_tensors: Any, tmp_path: Path
) -> None:
    stored, _ = quantized("fp8 in blocks", tiny_tensors("llama"))
    whole = write("llama", "fp8 in blocks")
    cache, source = tmp_path / "blobs", tmp_path / "snapshots" / "revision"
    cache.mkdir()
    source.mkdir(parents=True)
    (source / "config.json").write_bytes((whole / "config.json").read_bytes())
    weight_map = {}
    for blob, names in {"cafe": list(stored)[::2], "beef": list(stored)[1::2]}.items():
        write_safetensors(cache / blob, {name: stored[name] for name in names})
        file = f"model-{blob}.safetensors"
        (source / file).symlink_to(cache / blob)
        weight_map |= dict.fromkeys(names, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    target = tmp_path / "target"
    assert convert(source, target) == "safetensors"
    assert len(list(target.glob("*.safetensors"))) == 2
    assert_same(source, target)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_bits_become_numbers_if_it_is_asked(
    dtype: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    source, target = write("llama", "packed 4 bits by group"), tmp_path / "target"
    assert convert(source, target, dtype) == "orbax"
    assert read_config(target)[1].name == dtype
    want, found = load_model(source, dtype), load_model(target, dtype)
    jax.tree.map(np.testing.assert_array_equal, found.weights, want.weights)


@pytest.mark.parametrize("model", ["gemma3", "falcon_h1", "gpt_oss"])
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_other_checkpoints_keep_every_number(
    stored: str, model: str, write: Callable[..., Path], tiny_tensors: Any, tmp_path: Path
) -> None:
    numbers = np.dtype(getattr(ml_dtypes, stored, stored))
    source = write(
        model, None, {name: x.astype(numbers) for name, x in tiny_tensors(model).items()}
    )
    target = tmp_path / "target"
    assert convert(source, target) == "orbax"
    assert read_config(target)[1].name == ("bfloat16" if stored == "bfloat16" else "float32")
    assert_same(source, target)
    assert convert(target, tmp_path / "again") == "orbax"
    assert_same(source, tmp_path / "again")


def test_one_number_that_bfloat16_does_not_hold_is_enough(
    write: Callable[..., Path], tiny_tensors: Any, tmp_path: Path
) -> None:
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in tiny_tensors("llama").items()}
    name = "model.layers.1.mlp.up_proj.weight"
    source = write("llama", None, tensors | {name: tiny_tensors("llama")[name]})
    convert(source, tmp_path / "target")
    assert read_config(tmp_path / "target")[1].name == "float32"
    assert_same(source, tmp_path / "target")


@pytest.mark.parametrize("name", [None, "awq"])
def test_how_embeddings_are_pooled_is_kept(
    name: str | None, write: Callable[..., Path], tmp_path: Path
) -> None:
    source, target = write("llama", name), tmp_path / "target"
    kind = "sentence_transformers.models"
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [{"path": path, "type": f"{kind}.{each}"} for each, path in paths.items()]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    prompts = {"prompts": {"query": "Q: "}, "default_prompt_name": None}
    (source / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    convert(source, target)
    pooling = open_model(target).pooling
    assert pooling == open_model(source).pooling
    assert (pooling.pooling, pooling.prompts) == ("mean", {"query": "Q: "})


@pytest.mark.parametrize("name", [None, "awq"])
def test_a_classification_head_is_kept_or_refused_by_name(
    name: str | None, write: Callable[..., Path], tiny_tensors: Any, tmp_path: Path
) -> None:
    tensors = {key: x for key, x in tiny_tensors("llama").items() if key != "lm_head.weight"}
    tensors["score.weight"] = np.ones((3, tensors["model.norm.weight"].size), np.float32)
    architectures = ["LlamaForSequenceClassification"]
    source = write("llama", name, tensors, architectures=architectures)
    target = tmp_path / "target"
    if name is None:
        with pytest.raises(UnsupportedModelError, match="a classification head is not kept"):
            convert(source, target)
        assert not target.exists()
        return
    convert(source, target)
    head, found = open_model(source).head, open_model(target).head
    assert head is not None
    assert found is not None
    np.testing.assert_array_equal(found.weight, head.weight)


def test_nothing_is_written_over_and_nothing_of_a_checkpoint_that_lacks_some(
    write: Callable[..., Path], tiny_tensors: Any, tmp_path: Path
) -> None:
    stored, _ = quantized("awq", tiny_tensors("llama"))
    del stored["model.layers.1.mlp.up_proj.scales"]
    source = write("llama", None, stored, quantization_config=FORMATS["awq"][0])
    with pytest.raises(ModelLoadError, match=r"lacks .*up_proj\.scales"):
        convert(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    with pytest.raises(InvalidConfigError, match="a new or empty directory"):
        convert(source, source)
