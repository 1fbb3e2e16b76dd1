"""A Hugging Face directory: config.json and one or more safetensors files."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import MAX_TENSORS
from octavo.models.classification_head import ClassificationHead
from octavo.models.config import ModelConfig
from octavo.models.families.composite import is_composite, text_tensor
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.expert_fields import NEXT_TOKENS
from octavo.models.families.table import config_from_hf, is_classifier
from octavo.models.loading.fused_experts import FusedPart, fused_parts
from octavo.models.loading.json_file import read_json
from octavo.models.loading.mxfp4 import (
    SUFFIXES,
    PackedTensor,
    blocks_of,
    dequantized,
    packed_tensors,
)
from octavo.models.loading.tensors import expected_tensors
from octavo.models.tensor_layouts import Index

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
PACKED = "U8"
"""Of what is no number by itself."""
RENAMED = (
    ("backbone.embeddings.", "model.embed_tokens."),
    ("model.embeddings.", "model.embed_tokens."),
    ("backbone.", "model."),
)
"""How the names of tensors begin in files of Nemotron-H -> how those of others do."""
PREFIX = "model."
"""How the names of nearly all tensors begin; of a model without an output layer, none does."""
HEAD = "score.weight"
MAX_CLASSES = 4096
MAX_HEADER_BYTES = 1 << 24
"""Longest header that is parsed: 256 bytes for each of `MAX_TENSORS` tensors."""
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl")


class SafetensorsSource:
    """A `TensorSource` over a Hugging Face directory. Tensors are memory-mapped.

    Attributes:
        config: what config.json says.
        norms_include_offset: False: Hugging Face stores w of 1 + w.

    Raises (on construction):
        ModelLoadError: a file is missing, damaged, of a wrong dtype, outside the directory, or
            lists too many tensors.
        UnsupportedModelError: an architecture or field that is not supported.
    """

    norms_include_offset = False

    def __init__(self, path: str | Path) -> None:
        directory = Path(path)
        values = read_json(directory / CONFIG_FILE)
        self._files: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._parts: dict[str, FusedPart] = {}
        self._packed: dict[str, PackedTensor] = {}
        dtypes = [self._open(shard) for shard in _shard_paths(directory)]
        self._check_index(directory)
        largest = max(dtypes, default={}, key=len)
        found = [dtype for dtype in largest.values() if dtype in DTYPES]
        if values.get("dtype") is None and values.get("torch_dtype") is None and found:
            values = values | {"dtype": DTYPES[max(set(found), key=found.count)]}
        self.config: ModelConfig = _with_generation_eos(config_from_hf(values), directory)
        stored_names = self._stored_names(directory, is_composite(values))
        # Qwen's layers that guess tokens beyond the next one; not every config.json tells of them.
        self._stored = {
            name: stored for name, stored in stored_names.items() if not name.startswith("mtp.")
        }
        if any(values.get(name) for name in NEXT_TOKENS):
            kept = _without_next_tokens(self._stored, self.config.num_layers)
            self._stored = {name: self._stored[name] for name in kept}
        stored = {name: self._shapes[stored] for name, stored in self._stored.items()}
        self._packed = packed_tensors(stored, str(directory))
        self._parts = fused_parts(self.shapes(), expected_tensors(self.config))
        self.head: ClassificationHead | None = None
        if is_classifier(values):
            self.head = self._read_head(directory, values)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        taken = {part.stored for part in self._parts.values()}
        for packed in self._packed.values():
            taken |= {packed.blocks, packed.scales}
        shapes = {
            name: self._shapes[stored] for name, stored in self._stored.items() if name not in taken
        }
        shapes |= {name: part.shape for name, part in self._parts.items()}
        return shapes | {name: packed.shape for name, packed in self._packed.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        if name in self._parts:
            part = self._parts[name]
            return self._slice(part.stored, part.index(index))[0]
        if name in self._packed:
            packed, (at, within) = self._packed[name], blocks_of(index)
            blocks, scales = self._slice(packed.blocks, at), self._slice(packed.scales, at)
            return dequantized(blocks, scales, name)[within].swapaxes(1, 2)
        return self._slice(name, index)

    def _slice(self, name: str, index: Index) -> np.ndarray:
        stored = self._stored[name]
        tensor: np.ndarray = self._files[stored].get_slice(stored)[index]
        return tensor

    def _stored_names(self, directory: Path, is_composite: bool) -> dict[str, str]:
        """Name of each tensor of the text model -> what it is stored as."""
        if not is_composite:
            prefixes = (PREFIX, *(old for old, _ in RENAMED))
            prefix = "" if any(name.startswith(prefixes) for name in self._files) else PREFIX
            return {_renamed(prefix + name): name for name in self._files}
        names: dict[str, str] = {}
        for stored in self._files:
            name = text_tensor(stored)
            if name in names:
                raise ModelLoadError(
                    f"{directory} holds {shorten(name)} twice, as {shorten(stored)} and "
                    f"{shorten(names[name])}"
                )
            if name is not None:
                names[name] = stored
        return names

    def _read_head(self, directory: Path, values: Mapping[str, Any]) -> ClassificationHead:
        """The classification head, whose tensor the decoder does not know."""
        stored = self._stored.pop(HEAD, None) or self._stored.pop(PREFIX + HEAD, None)
        if stored is None:
            raise ModelLoadError(f"{directory} lacks {HEAD}, by its architecture")
        shape, width = self._shapes[stored], self.config.hidden_size
        if len(shape) != 2 or shape[1] != width or not 1 <= shape[0] <= MAX_CLASSES:
            raise ModelLoadError(
                f"{directory}: the shape of {HEAD} = {shape} is not allowed: 1 to {MAX_CLASSES} "
                f"classes of {width} numbers"
            )
        weight = np.asarray(self._files[stored].get_slice(stored)[:], np.float32)
        return ClassificationHead(weight=weight, labels=_labels(values, len(weight)))

    def _open(self, path: Path) -> dict[str, str]:
        """Map a shard and note its tensors. Returns name -> stored dtype."""
        _check_header_length(path)
        try:
            shard = safe_open(path, framework="np")
            names = list(shard.keys())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is not a sound safetensors file: {error}") from error
        num_tensors = len(self._files) + len(names)
        if num_tensors > MAX_TENSORS:
            raise ModelLoadError(
                f"{path}: {num_tensors} tensors is not allowed: at most {MAX_TENSORS} in all shards"
            )
        dtypes: dict[str, str] = {}
        for name in names:
            if name in self._files:
                raise ModelLoadError(f"{path}: the tensor {shorten(name)} is also in another shard")
            view = shard.get_slice(name)
            dtypes[name] = view.get_dtype()
            self._files[name], self._shapes[name] = shard, tuple(view.get_shape())
        for name, dtype in dtypes.items():
            is_harmless = name.endswith((".attn.bias", ".masked_bias"))
            is_known = dtype == PACKED if name.endswith(SUFFIXES) else dtype in DTYPES
            if not is_known and not is_harmless:
                raise ModelLoadError(
                    f"{path}: the dtype of {shorten(name)} = {dtype} is not allowed: "
                    f"{', '.join(DTYPES)}"
                )
        return dtypes

    def _check_index(self, directory: Path) -> None:
        if not (directory / INDEX_FILE).is_file():
            return
        for name, shard in _weight_map(directory).items():
            if name not in self._files:
                raise ModelLoadError(
                    f"{directory / INDEX_FILE} places {shorten(name)} in {shorten(shard)}, "
                    "which does not hold it"
                )


def _renamed(name: str) -> str:
    for old, new in RENAMED:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _without_next_tokens(names: Iterable[str], num_layers: int) -> list[str]:
    """The names without those of layers that guess tokens beyond the next one."""

    def guesses(name: str) -> bool:
        layer = _LAYER.match(name)
        return name.startswith("model.mtp_") or (
            layer is not None and int(layer.group(1)) >= num_layers
        )

    return [name for name in names if not guesses(name)]


def _labels(values: Mapping[str, Any], num_classes: int) -> tuple[str, ...]:
    """The classes' names, as far as config.json has one for each."""
    named = values.get("id2label")
    names = [named.get(str(i)) for i in range(num_classes)] if isinstance(named, dict) else []
    if not names or not all(isinstance(name, str) for name in names):
        return tuple(f"LABEL_{i}" for i in range(num_classes))
    return tuple(map(str, names))


def read_config(directory: Path) -> ModelConfig:
    """What config.json and generation_config.json say; no tensor is opened.

    Raises:
        As for `SafetensorsSource`.
    """
    return _with_generation_eos(config_from_hf(read_json(directory / CONFIG_FILE)), directory)


def _with_generation_eos(config: ModelConfig, directory: Path) -> ModelConfig:
    """Chat models often name their end-of-turn token in generation_config.json alone."""
    path = directory / GENERATION_CONFIG_FILE
    if not path.is_file():
        return config
    more = ConfigFields(read_json(path), where=GENERATION_CONFIG_FILE).token_ids("eos_token_id")
    return dataclasses.replace(
        config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more))
    )


def _shard_paths(directory: Path) -> list[Path]:
    if (directory / INDEX_FILE).is_file():
        names = sorted(set(_weight_map(directory).values()))
    elif (directory / SINGLE_FILE).is_file():
        names = [SINGLE_FILE]
    else:
        pickles = sorted(
            entry.name for entry in directory.iterdir() if entry.suffix in PICKLE_SUFFIXES
        )
        if pickles:
            raise UnsupportedModelError(
                f"{directory / pickles[0]} is a pickle, which could run code, and is never read: "
                "save the model as safetensors"
            )
        raise ModelLoadError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    return [_inside(directory, name) for name in names]


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) for shard in weight_map.values()
    ):
        raise ModelLoadError(f"{directory / INDEX_FILE}: weight_map is not a map of file names")
    return weight_map


def _inside(directory: Path, name: str) -> Path:
    """The shard `name` of `directory`, refused if it lies anywhere else.

    The one link allowed to leave is that of the Hugging Face cache, whose snapshots link into the
    sibling folder of blobs.
    """
    refusal = ModelLoadError(
        f"the shard {shorten(name)} is not allowed: a .safetensors file inside {directory}"
    )
    if not name.endswith(".safetensors") or Path(name).is_absolute() or ".." in Path(name).parts:
        raise refusal
    roots = [directory.resolve()]
    if roots[0].parent.name == "snapshots":
        roots.append(roots[0].parent.parent / "blobs")
    try:
        path = (directory / name).resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long, with a NUL, a circle of links
        raise refusal from None
    if not any(path.is_relative_to(root) for root in roots):
        raise refusal
    if not is_file:
        raise ModelLoadError(f"the shard {shorten(name)} is missing from {directory}")
    return path


def _check_header_length(path: Path) -> None:
    """Refuse a header that is too long to be parsed; the library refuses other lies."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if len(start) == 8 and MAX_HEADER_BYTES < struct.unpack("<Q", start)[0] < path.stat().st_size:
        raise ModelLoadError(
            f"{path} is not a sound safetensors file: its header is longer than "
            f"{MAX_HEADER_BYTES} bytes"
        )
