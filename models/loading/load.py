"""One door to every kind of checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from numpy.typing import NDArray

from octavo.engine.errors import InvalidConfigError
from octavo.models.classification_head import ClassificationHead
from octavo.models.config import ModelConfig
from octavo.models.loading.assemble import assemble_weights, check_tensors
from octavo.models.loading.locate import DUMMY, CheckpointKind, locate
from octavo.models.loading.packed import PackedReader
from octavo.models.loading.sentence_transformers import read_pooling
from octavo.models.loading.tensors import read_output_rows
from octavo.models.parameters import abstract_weights
from octavo.models.pooling_config import DEFAULT_POOLING, PoolingConfig
from octavo.models.quantization import (
    WeightForm,
    abstract_quantized_weights,
    check_quantization,
    quantized_weights,
    rounded_form,
)
from octavo.models.random_weights import random_weights
from octavo.pallas_kernels.quantized_linear import Quantization
from octavo.sharding.mesh import make_mesh, tensor_parallel_size

if TYPE_CHECKING:
    from octavo.models.loading.block_quantized import BlockQuantizedReader
    from octavo.models.loading.gguf import GGUFSource
    from octavo.models.loading.safetensors import SafetensorsSource

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        config: the model, with KV heads copied as the mesh needs.
        weights: the tree of `declare(config, dtype)`, sharded over the mesh.
        dtype: of the weights and activations.
        quantization: of the linear layers; None is none.
        source: the file or directory it came from.
        kind: what that is.
        tokenizer_source: a Hugging Face directory or a GGUF file that holds the tokenizer.
    """

    config: ModelConfig
    weights: dict[str, Any]
    dtype: jnp.dtype
    quantization: WeightForm | None = None
    source: Path
    kind: CheckpointKind
    tokenizer_source: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """A model whose weights have not been read yet.

    Attributes:
        config, dtype, quantization, source, kind, tokenizer_source: as of `LoadedModel`.
        mesh: where the weights will go.
        pooling: how its hidden states become embeddings.
        head: its classification head; None of most.
        output_rows: the output layer's float32[tokens, hidden size] of some token ids; None of
            kinds that cannot read a few of its rows.
        metadata: of a GGUF file, which hold its tokenizer too; None for other kinds.
        block_quantized: reads linear layers a second time, as blocks of small codes; None where a
            checkpoint has none, and where weights are not to be whole and in float32 on one CPU.
        packed: reads them so on any mesh, in place of dense ones; None unless `quantization` is
            "stored".
    """

    config: ModelConfig
    dtype: jnp.dtype
    quantization: WeightForm | None
    source: Path
    kind: CheckpointKind
    tokenizer_source: Path
    mesh: Mesh
    pooling: PoolingConfig = DEFAULT_POOLING
    head: ClassificationHead | None = None
    output_rows: Callable[[Sequence[int]], NDArray[np.float32]] | None = None
    metadata: Mapping[str, Any] | None = None
    block_quantized: BlockQuantizedReader | None = None
    packed: PackedReader | None = None
    _read: Callable[[], dict[str, Any]]

    def abstract_weights(self) -> dict[str, Any]:
        """The weights as `jax.ShapeDtypeStruct`s with shardings."""
        weights: dict[str, Any] = abstract_weights(self.config, self.dtype, self.mesh)
        if self.packed is not None:
            return self.packed.abstract_weights(weights)
        if self.quantization is None or self.quantization == "stored":
            return weights
        return abstract_quantized_weights(weights, self.config, self.quantization, self.mesh)

    def read_weights(self) -> dict[str, Any]:
        """Reads the weights onto the mesh.

        Raises:
            ModelLoadError: they are damaged, or an Orbax checkpoint lacks some.
        """
        return self._read()


def open_model(
    model: str | Path,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    quantization: str | None = None,
    *,
    load_format: str = "auto",
    seed: int = 0,
) -> OpenedModel:
    """Open a model: everything is known and checked but the weights' values.

    Args: as for `load_model`, and
        load_format: what it must be, or "dummy": random weights, whatever it is.
        seed: of those.

    Raises: as for `load_model`.
    """
    form = check_quantization(quantization)
    mesh = make_mesh(1) if mesh is None else mesh
    path, kind = locate(model, load_format)
    if load_format == DUMMY:
        rounded = rounded_form(form, "weights made at random")
        return _open_dummy(path, kind, dtype, mesh, rounded, seed)
    if kind == "orbax":
        return _open_orbax(path, dtype, mesh, rounded_form(form, "an Orbax checkpoint"))
    source = open_source(path, kind)
    config = source.config.with_tensor_parallel(tensor_parallel_size(mesh))
    resolved = resolve_dtype(dtype, config, mesh)
    check_tensors(source, config, str(path))
    packed = PackedReader(source, config, mesh) if form == "stored" else None
    if packed is not None and not packed.has_blocks(resolved):
        rounded_form(form, f"{path}, of which no linear layer is stored in blocks of small codes")
    return OpenedModel(
        config=config,
        dtype=resolved,
        quantization=form,
        source=path,
        kind=kind,
        tokenizer_source=path,
        mesh=mesh,
        pooling=read_pooling(path) if kind == "safetensors" else DEFAULT_POOLING,
        head=getattr(source, "head", None),
        output_rows=None if config.output_bias else partial(read_output_rows, source, config),
        metadata=getattr(source, "metadata", None),
        block_quantized=(
            _block_quantized(source, config, resolved, mesh) if form in (None, "stored") else None
        ),
        packed=packed,
        _read=partial(
            assemble_weights,
            source,
            config,
            resolved,
            mesh,
            None if form == "stored" else form,
            packed,
        ),
    )


def load_model(
    model: str | Path,
    dtype: str = "auto",
    mesh: Mesh | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Load a model onto a mesh.

    Args:
        model: a packaged model's name, a GGUF file, a Hugging Face directory, or an Orbax
            checkpoint directory.
        dtype: "float32", "bfloat16", or "auto": float32 on CPUs, the checkpoint's own elsewhere.
        mesh: where the weights go; None takes the first device alone.
        quantization: "int8" or "fp8" rounds the linear layers to it; "stored" leaves those that the
            checkpoint holds in blocks of small codes as they are; None or "none" does neither.

    Raises:
        ModelLoadError: the checkpoint is missing, damaged, incomplete or unsafe.
        UnsupportedModelError: its mathematics are not implemented.
        InvalidConfigError: an unknown dtype or quantization, or "stored" of a checkpoint that has
            no blocks.
    """
    opened = open_model(model, dtype, mesh, quantization)
    return LoadedModel(
        config=opened.config,
        weights=opened.read_weights(),
        dtype=opened.dtype,
        quantization=opened.quantization,
        source=opened.source,
        kind=opened.kind,
        tokenizer_source=opened.tokenizer_source,
    )


def load_config(model: str | Path) -> ModelConfig:
    """The configuration of a model, without its weights.

    Raises:
        As for `load_model`.
    """
    path, kind = locate(model)
    if kind == "orbax":
        from octavo.models.loading import orbax

        return orbax.read_config(path)[0]
    if kind == "safetensors":
        from octavo.models.loading.safetensors import read_config

        return read_config(path)
    return open_source(path, kind).config


def save_model(model: LoadedModel, destination: str | Path) -> None:
    """Write a loaded model as an Orbax checkpoint directory, which opens faster.

    Raises:
        ModelLoadError: the destination is not a new or empty directory.
        InvalidConfigError: the model is quantized: a checkpoint holds what it was read from.
    """
    if model.quantization is not None:
        raise InvalidConfigError("quantization", model.quantization, "none, to save a model")
    from octavo.models.loading import orbax

    orbax.save(destination, model.config, model.weights, model.dtype, model.tokenizer_source)


def open_source(path: Path, kind: CheckpointKind) -> GGUFSource | SafetensorsSource:
    """An open checkpoint that is no Orbax directory.

    Raises:
        As for `load_model`.
    """
    # Each library is imported when its kind of file is met: start-up pays for one of them.
    if kind == "gguf":
        from octavo.models.loading.gguf import GGUFSource

        return GGUFSource(path)
    from octavo.models.loading.safetensors import SafetensorsSource

    return SafetensorsSource(path)


def _block_quantized(
    source: GGUFSource | SafetensorsSource, config: ModelConfig, dtype: jnp.dtype, mesh: Mesh
) -> BlockQuantizedReader | None:
    on_cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    if not on_cpu or dtype != jnp.float32:
        return None
    if not source.is_quantized:
        return None
    from octavo.models.loading.block_quantized import BlockQuantizedReader

    return BlockQuantizedReader(source, config, mesh)


def _open_orbax(
    path: Path, dtype: str, mesh: Mesh, quantization: Quantization | None
) -> OpenedModel:
    from octavo.models.loading import orbax

    stored, stored_dtype = orbax.read_config(path)
    stored = dataclasses.replace(stored, checkpoint_dtype=stored_dtype.name)
    config = stored.with_tensor_parallel(tensor_parallel_size(mesh))
    resolved = resolve_dtype(dtype, config, mesh)
    orbax.check_weights(path, stored)

    def read() -> dict[str, Any]:
        weights = orbax.restore_weights(path, config, resolved, mesh)
        if quantization is None:
            return weights
        return quantized_weights(weights, config, quantization, mesh)

    return OpenedModel(
        config=config,
        dtype=resolved,
        quantization=quantization,
        source=path,
        kind="orbax",
        tokenizer_source=orbax.tokenizer_source(path),
        mesh=mesh,
        pooling=read_pooling(path) if (path / "config.json").is_file() else DEFAULT_POOLING,
        _read=read,
    )


def _open_dummy(
    path: Path,
    kind: CheckpointKind,
    dtype: str,
    mesh: Mesh,
    quantization: Quantization | None,
    seed: int,
) -> OpenedModel:
    config = load_config(path).with_tensor_parallel(tensor_parallel_size(mesh))
    resolved = resolve_dtype(dtype, config, mesh)
    tokenizer = path
    if kind == "orbax":
        from octavo.models.loading import orbax

        tokenizer = orbax.tokenizer_source(path)
    return OpenedModel(
        config=config,
        dtype=resolved,
        quantization=quantization,
        source=path,
        kind=kind,
        tokenizer_source=tokenizer,
        mesh=mesh,
        pooling=read_pooling(path) if (path / "config.json").is_file() else DEFAULT_POOLING,
        _read=partial(random_weights, config, resolved, mesh, seed, quantization),
    )


def resolve_dtype(dtype: str, config: ModelConfig, mesh: Mesh) -> jnp.dtype:
    """The dtype of weights that "auto" or a name means here.

    Raises:
        InvalidConfigError: another name.
    """
    if dtype == "auto":
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        wide = on_cpu or config.checkpoint_dtype == "float32"
        return jnp.dtype(jnp.float32 if wide else jnp.bfloat16)
    if dtype not in DTYPES:
        raise InvalidConfigError("dtype", dtype, f"auto, {' or '.join(DTYPES)}")
    return jnp.dtype(dtype)
