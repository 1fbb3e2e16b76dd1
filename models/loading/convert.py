"""From any checkpoint to a directory that holds its numbers, none of them rounded.

What is stored in few bits stays so: its tensors are copied byte for byte, without those that
nothing reads. Any other becomes an Orbax checkpoint, which opens faster.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

from octavo.engine.errors import InvalidConfigError, UnsupportedModelError
from octavo.models.loading.assemble import check_tensors
from octavo.models.loading.gguf import GGUFSource
from octavo.models.loading.load import load_model, open_source, save_model
from octavo.models.loading.locate import locate
from octavo.models.loading.orbax import TOKENIZER_FILES, read_config
from octavo.models.loading.safetensors import (
    INDEX_FILE,
    QUANTIZATION_FILE,
    SINGLE_FILE,
    SafetensorsSource,
)
from octavo.models.loading.sentence_transformers import copy_pooling
from octavo.models.loading.shard import write_shard
from octavo.models.loading.tensors import prefix_of
from octavo.models.parameters import declare, is_spec
from octavo.models.quantization import path_keys

WIDE, NARROW = "float32", "bfloat16"


def convert(model: str | Path, target: Path, dtype: str = "auto") -> str:
    """Write a checkpoint of a model's numbers.

    Args:
        model: as for `load_model`.
        target: a new or empty directory.
        dtype: "auto" keeps numbers as they are stored; another one is that of an Orbax checkpoint,
            also of a model that is stored in few bits.

    Returns:
        What was written: "orbax", or the kind of checkpoint that was kept.

    Raises:
        As for `load_model`.
        InvalidConfigError: the target holds something, or cannot be written to.
        UnsupportedModelError: an Orbax checkpoint cannot hold all of it.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidConfigError("DST", str(target), "a new or empty directory")
    path, kind = locate(model)
    if kind == "orbax":
        stored = read_config(path)[1].name
        _make_writable(target)
        return _write_orbax(path, target, stored if dtype == "auto" else dtype)
    source = open_source(path, kind)
    check_tensors(source, source.config, str(path))
    if source.is_quantized and dtype == "auto":
        _make_writable(target)
        if isinstance(source, GGUFSource):
            _copy_gguf(path, target)
        else:
            _copy_safetensors(path, source, target)
        return kind
    if isinstance(source, SafetensorsSource) and source.head is not None:
        raise UnsupportedModelError(
            f"{path}: a classification head is not kept by an Orbax checkpoint: serve it as it is"
        )
    _make_writable(target)
    return _write_orbax(path, target, _least_dtype(source) if dtype == "auto" else dtype)


def _make_writable(target: Path) -> None:
    """Makes the target, before a model is read in vain."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=target).close()
    except OSError as error:
        allowed = f"a directory that can be written to ({error.strerror})"
        raise InvalidConfigError("DST", str(target), allowed) from None


def _write_orbax(path: Path, target: Path, dtype: str) -> str:
    save_model(load_model(path, dtype), target)
    return "orbax"


def _least_dtype(source: SafetensorsSource | GGUFSource) -> str:
    """What holds every number: bfloat16 where all are that would be."""
    specs = declare(source.config, jnp.dtype(NARROW))
    for path, spec in jax.tree.flatten_with_path(specs, is_leaf=is_spec)[0]:
        prefix = prefix_of(path_keys(path))
        if spec.dtype == NARROW and not all(
            source.is_bfloat16(prefix + tensor.name) for tensor in spec.layout.tensors
        ):
            return WIDE
    return NARROW


def _copy_gguf(path: Path, target: Path) -> None:
    part = target / f"{path.name}.part"
    shutil.copyfile(path, part)
    os.replace(part, target / path.name)


def _copy_safetensors(path: Path, source: SafetensorsSource, target: Path) -> None:
    """A file for each of the source's, with those of its tensors that the model is made of."""
    by_file: dict[Path, list[str]] = {}
    for name, shard in source.stored.items():
        by_file.setdefault(shard.path, []).append(name)
    count = len(by_file)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(by_file.values(), 1):
        file = SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        write_shard(target / file, source.stored[names[0]], names)
        weight_map |= dict.fromkeys(names, file)
    if count > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (target / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    copy_pooling(path, target)
    # config.json comes last, because its presence is what makes the directory a checkpoint.
    for name in (QUANTIZATION_FILE, *TOKENIZER_FILES):
        if (path / name).is_file():
            shutil.copyfile(path / name, target / name)
