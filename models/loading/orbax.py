"""Octavo's own checkpoint: Orbax arrays in the decoder's layout, with config and tokenizer beside.

::

    DIR/octavo_config.json     format version, dtype, ModelConfig
    DIR/weights/               Orbax: one array a parameter, named by its path ("layers.3.wqkv")
    DIR/tokenizer.json, …      the source's tokenizer files, or tokenizer.gguf
    DIR/modules.json, …        how hidden states become embeddings, if the source says it

Arrays are stored without copies of KV heads, so that any mesh can restore them: each device reads
its own slices, nothing is dequantized, transposed or fused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.config import ModelConfig
from octavo.models.config_dict import config_from_dict, config_to_dict
from octavo.models.flat_config import config_from_flat_dict
from octavo.models.kv_heads import with_kv_heads
from octavo.models.loading.assemble import check_shapes
from octavo.models.loading.gguf_file import GGUFFile, write_metadata_only
from octavo.models.loading.json_file import MAX_JSON_BYTES, check_file_size, read_json
from octavo.models.loading.sentence_transformers import copy_pooling
from octavo.models.parameters import declare, is_spec

FORMAT_VERSION = 2
FLAT_VERSION = 1
"""Of checkpoints saved before layers had specs, which are read still."""
CONFIG_FILE = "octavo_config.json"
WEIGHTS_DIR = "weights"
METADATA_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "_sharding")
TOKENIZER_GGUF = "tokenizer.gguf"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",  # by which `transformers` knows the tokenizer's class
)
DTYPES = ("float32", "bfloat16")


def save(
    destination: str | Path,
    config: ModelConfig,
    weights: Mapping[str, Any],
    dtype: jnp.dtype,
    tokenizer_source: Path,
) -> None:
    """Write a checkpoint directory that `restore` opens.

    Args:
        destination: a directory that does not exist yet, or is empty.
        config: the model, as loaded.
        weights: its weights, on any mesh.
        dtype: of the weights.
        tokenizer_source: directory or GGUF file to take the tokenizer from.

    Raises:
        ModelLoadError: the destination holds something already, or cannot be written to.
    """
    directory = Path(destination).expanduser().resolve()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ModelLoadError(
            f"destination = {str(directory)!r} is not allowed: a new or empty directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    stored = config.without_kv_head_copies()
    with ocp.StandardCheckpointer() as checkpointer:
        plain = with_kv_heads(weights, config, stored, weights["embed"].sharding.mesh)
        try:
            checkpointer.save(directory / WEIGHTS_DIR, _flatten(plain))
            checkpointer.wait_until_finished()
        except Exception as error:  # whichever Orbax and what it writes with raise
            raise ModelLoadError(f"{directory / WEIGHTS_DIR} cannot be written: {error}") from error
    _copy_tokenizer(tokenizer_source, directory)
    # Last, because its presence is what makes the directory a checkpoint.
    document = {
        "format_version": FORMAT_VERSION,
        "dtype": jnp.dtype(dtype).name,
        "model": config_to_dict(stored),
    }
    (directory / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_config(directory: Path) -> tuple[ModelConfig, jnp.dtype]:
    """The model of a checkpoint directory and the dtype it is stored in.

    Raises:
        ModelLoadError: the file is malformed or of another version.
    """
    path = directory / CONFIG_FILE
    document = read_json(path)
    version = document.get("format_version")
    if version not in (FLAT_VERSION, FORMAT_VERSION):
        raise ModelLoadError(
            f"{path}: format_version = {shorten(version)} is not allowed: "
            f"{FLAT_VERSION} or {FORMAT_VERSION}"
        )
    if document.get("dtype") not in DTYPES:
        raise ModelLoadError(
            f"{path}: dtype = {shorten(document.get('dtype'))} is not allowed: "
            f"{' or '.join(DTYPES)}"
        )
    if not isinstance(document.get("model"), dict):
        raise ModelLoadError(f"{path} lacks model")
    read = config_from_flat_dict if version == FLAT_VERSION else config_from_dict
    return read(document["model"]), jnp.dtype(document["dtype"])


def check_weights(directory: Path, config: ModelConfig) -> None:
    """Refuse a checkpoint directory that does not hold exactly the arrays of its model.

    Nothing is built by the sizes that a configuration claims before this has passed; also, a
    restore that fails leaves Orbax's other reads running.

    Args:
        directory: the checkpoint.
        config: its model, as stored.

    Raises:
        ModelLoadError: arrays are missing, unknown, damaged, or of other shapes.
    """
    path = directory.resolve() / WEIGHTS_DIR
    for name in METADATA_FILES:
        if (path / name).is_file():
            check_file_size(path / name, MAX_JSON_BYTES)
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            found = {
                name: tuple(array.shape)
                for name, array in checkpointer.metadata(path).item_metadata.tree.items()
            }
        except Exception as error:  # Orbax raises whatever its storage raised
            raise ModelLoadError(f"{path} is not a sound Orbax checkpoint: {error}") from error
    specs = jax.tree.flatten_with_path(declare(config, jnp.dtype("float32")), is_leaf=is_spec)[0]
    expected = {_path_name(keys): spec.shape for keys, spec in specs}
    check_shapes(found, expected, where=str(path))


def restore_weights(
    directory: Path, config: ModelConfig, dtype: jnp.dtype, mesh: Mesh
) -> dict[str, Any]:
    """Read the weights of a checkpoint directory onto a mesh.

    Args:
        directory: a checkpoint that passed `check_weights`.
        config: its model, with KV heads copied for the mesh.
        dtype: of the weights wanted; another one than stored is converted.
        mesh: where they go.

    Raises:
        ModelLoadError: arrays are damaged.
    """
    stored = config.without_kv_head_copies()
    specs = declare(stored, dtype)
    wanted = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=spec.sharding(mesh)),
        specs,
        is_leaf=is_spec,
    )
    path = directory.resolve() / WEIGHTS_DIR
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            arrays = checkpointer.restore(path, _flatten(wanted))
        except Exception as error:
            raise ModelLoadError(f"{path} cannot be restored: {error}") from error
    weights: dict[str, Any] = jax.tree.map(
        lambda name: arrays[name], _names(specs), is_leaf=lambda node: isinstance(node, str)
    )
    return with_kv_heads(weights, stored, config, mesh)


def tokenizer_source(directory: Path) -> Path:
    """Where the tokenizer of a checkpoint directory is."""
    packed = directory / TOKENIZER_GGUF
    return packed if packed.is_file() else directory


def _path_name(path: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _flatten(tree: Any) -> dict[str, Any]:
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {_path_name(path): leaf for path, leaf in leaves}


def _names(specs: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: _path_name(path), specs, is_leaf=is_spec)


def _copy_tokenizer(source: Path, directory: Path) -> None:
    if source.is_file():
        write_metadata_only(GGUFFile(source), directory / TOKENIZER_GGUF)
        return
    copy_pooling(source, directory)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
