"""A Hugging Face directory: config.json and one or more safetensors files."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.engine.errors import ModelLoadError, UnsupportedModelError, shorten
from octavo.models.checks import MAX_TENSORS
from octavo.models.classification_head import ClassificationHead
from octavo.models.config import ModelConfig
from octavo.models.families.composite import is_composite, text_tensor
from octavo.models.families.config_fields import ConfigFields
from octavo.models.families.expert_fields import NEXT_TOKENS
from octavo.models.families.table import config_from_hf, is_classifier
from octavo.models.loading.fused_experts import fused_parts
from octavo.models.loading.json_file import read_json
from octavo.models.loading.shard import Shard
from octavo.models.loading.stored.blocks import block_type, read_blocks
from octavo.models.loading.stored.disk import Entry
from octavo.models.loading.stored.formats import FIELD, without_quantization
from octavo.models.loading.stored.tensor import StoredTensor
from octavo.models.loading.tensors import expected_tensors
from octavo.models.tensor_layouts import Index
from octavo.pallas_kernels.stored_blocks import Blocks, BlockType

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
QUANTIZATION_FILE = "hf_quant_config.json"
"""Where ModelOpt says how weights are stored, if config.json does not."""
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
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
_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.")
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl")


class SafetensorsSource:
    """A `TensorSource` over a Hugging Face directory. Tensors are memory-mapped; quantized ones are
    read as the numbers they stand for.

    Attributes:
        config: what config.json says.
        norms_include_offset: False: Hugging Face stores w of 1 + w.
        is_quantized: whether any tensor is.
        stored: the tensors of the text model, by their names on disk, and the files they are in.

    Raises (on construction):
        ModelLoadError: a file is missing, damaged, of a wrong dtype, outside the directory, or
            lists too many tensors.
        UnsupportedModelError: an architecture or field that is not supported.
    """

    norms_include_offset = False

    def __init__(self, path: str | Path) -> None:
        directory = Path(path)
        self._shards: dict[str, Shard] = {}
        for shard in map(Shard, _shard_paths(directory)):
            self._add(shard)
        self._check_index(directory)
        values, form = without_quantization(_read_values(directory))
        values = self._with_dtype(values)
        self.config: ModelConfig = _with_generation_eos(config_from_hf(values), directory)
        names = self._stored_names(directory, is_composite(values))
        # Qwen's layers that guess tokens beyond the next one; not every config.json tells of them.
        names = {name: stored for name, stored in names.items() if not name.startswith("mtp.")}
        if any(values.get(name) for name in NEXT_TOKENS):
            kept = _without_next_tokens(names, self.config.num_layers)
            names = {name: names[name] for name in kept}
        self.stored = {stored: self._shards[stored] for stored in names.values()}
        self.head: ClassificationHead | None = None
        if is_classifier(values):
            self.head = self._read_head(directory, names, values)
        entries = {
            name: Entry(*self._shards[stored].entries[stored], stored)
            for name, stored in names.items()
        }
        self._disk = _Disk(str(directory), entries, self._shards)
        expected = expected_tensors(self.config)
        self._quantized: dict[str, StoredTensor] = {}
        taken: set[str] = set()
        if form is not None:
            found = form(self._disk, expected)
            self._quantized = found.tensors
            taken = found.unused.union(*(tensor.names for tensor in found.tensors.values()))
        plain = {name: entry for name, entry in entries.items() if name not in taken}
        _check_dtypes(plain, str(directory))
        whole = {name: entry.shape for name, entry in plain.items()}
        whole |= {name: tensor.shape for name, tensor in self._quantized.items()}
        self.is_quantized = bool(self._quantized)
        self._parts = fused_parts(whole, expected)
        fused = {part.stored for part in self._parts.values()}
        self._shapes = {name: shape for name, shape in whole.items() if name not in fused}
        self._shapes |= {name: part.shape for name, part in self._parts.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str, index: Index) -> np.ndarray:
        if name in self._parts:
            part = self._parts[name]
            whole: np.ndarray = self._read(part.stored, part.index(index))
            return whole.reshape(whole.shape[1:])
        return self._read(name, index)

    def is_bfloat16(self, name: str) -> bool:
        """Whether a tensor's numbers are stored in bfloat16."""
        part = self._parts.get(name)
        stored = name if part is None else part.stored
        return stored not in self._quantized and self._disk.entries[stored].dtype == "BF16"

    def block_type(self, name: str) -> BlockType | None:
        """How the blocks of a tensor are held; None if it has none."""
        tensor = self._quantized.get(name)
        return None if tensor is None else block_type(self._disk, tensor)

    def read_blocks(self, name: str) -> Blocks:
        """All of a tensor that has blocks; what they stand for is what `read` reads."""
        return read_blocks(self._disk, self._quantized[name])

    def _read(self, name: str, index: Index) -> np.ndarray:
        quantized = self._quantized.get(name)
        if quantized is not None:
            return quantized.read(self._disk, index)
        return self._disk.read(name, index)

    def _with_dtype(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values, with the dtype of most weights where they name none."""
        if values.get("dtype") is not None or values.get("torch_dtype") is not None:
            return values
        weights = {name: shard for name, shard in self._shards.items() if name.endswith("weight")}
        kinds = (shard.entries[name][1] for name, shard in weights.items())
        found = Counter(kind for kind in kinds if kind in DTYPES).most_common(1)
        return values | {"dtype": DTYPES[found[0][0]]} if found else values

    def _stored_names(self, directory: Path, is_composite: bool) -> dict[str, str]:
        """Name of each tensor of the text model -> what it is stored as."""
        names: dict[str, str] = {}
        prefixes = (PREFIX, *(old for old, _ in RENAMED))
        prefix = "" if any(name.startswith(prefixes) for name in self._shards) else PREFIX
        for stored in self._shards:
            name = text_tensor(stored) if is_composite else _renamed(prefix + stored)
            if name in names:
                raise ModelLoadError(
                    f"{directory} holds {shorten(name)} twice, as {shorten(stored)} and "
                    f"{shorten(names[name])}"
                )
            if name is not None:
                names[name] = stored
        return names

    def _read_head(
        self, directory: Path, names: dict[str, str], values: Mapping[str, Any]
    ) -> ClassificationHead:
        """The classification head, whose tensor the decoder does not know: taken from `names`."""
        stored = names.pop(HEAD, None) or names.pop(PREFIX + HEAD, None)
        if stored is None:
            raise ModelLoadError(f"{directory} lacks {HEAD}, by its architecture")
        shape, dtype = self._shards[stored].entries[stored]
        _check_dtypes({stored: Entry(shape, dtype, stored)}, str(directory))
        width = self.config.hidden_size
        if len(shape) != 2 or shape[1] != width or not 1 <= shape[0] <= MAX_CLASSES:
            raise ModelLoadError(
                f"{directory}: the shape of {HEAD} = {shape} is not allowed: 1 to {MAX_CLASSES} "
                f"classes of {width} numbers"
            )
        weight = self._shards[stored].read(stored).astype(np.float32)
        return ClassificationHead(weight=weight, labels=_labels(values, len(weight)))

    def _add(self, shard: Shard) -> None:
        num_tensors = len(self._shards) + len(shard.entries)
        if num_tensors > MAX_TENSORS:
            raise ModelLoadError(
                f"{shard.path}: {num_tensors} tensors is not allowed: at most {MAX_TENSORS} in all "
                "shards"
            )
        for name in shard.entries:
            if name in self._shards:
                raise ModelLoadError(
                    f"{shard.path}: the tensor {shorten(name)} is also in another shard"
                )
            self._shards[name] = shard

    def _check_index(self, directory: Path) -> None:
        if not (directory / INDEX_FILE).is_file():
            return
        for name, shard in _weight_map(directory).items():
            if name not in self._shards:
                raise ModelLoadError(
                    f"{directory / INDEX_FILE} places {shorten(name)} in {shorten(shard)}, "
                    "which does not hold it"
                )


def _renamed(name: str) -> str:
    for old, new in RENAMED:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


@dataclass(frozen=True, slots=True)
class _Disk:
    """See `Disk`."""

    where: str
    entries: Mapping[str, Entry]
    shards: Mapping[str, Shard]

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        stored = self.entries[name].stored_as
        return self.shards[stored].read(stored, index)


def _check_dtypes(entries: Mapping[str, Entry], where: str) -> None:
    """Refuse tensors whose numbers are no floats, but for what nothing reads."""
    for name, entry in entries.items():
        if entry.dtype not in DTYPES and not name.endswith((".attn.bias", ".masked_bias")):
            raise ModelLoadError(
                f"{where}: the dtype of {shorten(entry.stored_as)} = {entry.dtype} is not allowed: "
                f"{', '.join(DTYPES)}"
            )


def _read_values(directory: Path) -> dict[str, Any]:
    """config.json, with what ModelOpt's file says of weights if it says nothing itself."""
    values = dict(read_json(directory / CONFIG_FILE))
    path = directory / QUANTIZATION_FILE
    if values.get(FIELD) is None and path.is_file():
        how = read_json(path).get("quantization")
        if isinstance(how, dict):
            values[FIELD] = how | {"quant_method": "modelopt"}
    return values


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
    values, _ = without_quantization(_read_values(directory))
    return _with_generation_eos(config_from_hf(values), directory)


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
        names = _numbered_shards(directory)
    return [_inside(directory, name) for name in names]


def _numbered_shards(directory: Path) -> list[str]:
    """The files of a directory without an index, by the numbers in their names."""
    found = [match for entry in directory.iterdir() if (match := _NUMBERED.fullmatch(entry.name))]
    if not found:
        raise ModelLoadError(f"{directory} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    stems = {(match["stem"], match["count"]) for match in found}
    if len(stems) > 1:
        listed = ", ".join(f"{stem}-*-of-{count}.safetensors" for stem, count in sorted(stems)[:3])
        raise ModelLoadError(f"{directory} has no {INDEX_FILE} that says which to read: {listed}")
    missing = set(range(1, int(found[0]["count"]) + 1)) - {int(match["number"]) for match in found}
    if missing:
        raise ModelLoadError(
            f"{directory} has no {INDEX_FILE}, and of the files beside {found[0][0]} number "
            f"{min(missing)} is missing"
        )
    return sorted(match[0] for match in found)


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
