"""From an open checkpoint to weights on a mesh, each device reading only its own slices."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from octavo.engine.errors import ModelLoadError, shorten
from octavo.models.config import ModelConfig
from octavo.models.loading.packed import PackedReader
from octavo.models.loading.tensors import (
    LM_HEAD,
    TensorSource,
    expected_shapes,
    layer_prefix,
    read_parameter,
)
from octavo.models.parameters import ParamSpec, declare, is_spec
from octavo.models.quantization import is_quantized, path_keys, quantize_parameter
from octavo.models.tensor_layouts import Index
from octavo.pallas_kernels.quantized_linear import Quantization

MAX_READERS = 4
"""Threads that read and convert; they spend their time in NumPy, outside the interpreter lock."""

HARMLESS_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Tensors that old checkpoints carry and that nothing reads."""


def check_tensors(source: TensorSource, config: ModelConfig, where: str) -> None:
    """Refuse a checkpoint that does not hold exactly what its configuration says.

    Raises:
        ModelLoadError: a tensor is missing, unknown, or of another shape.
    """
    unread = _unread(config)
    found = {
        name: shape
        for name, shape in source.shapes().items()
        if not name.endswith(HARMLESS_SUFFIXES)
        and not name.startswith(unread)
        and not (name == LM_HEAD and config.tie_word_embeddings)
    }
    check_shapes(found, expected_shapes(config), where)


def _unread(config: ModelConfig) -> tuple[str, ...]:
    """How the names of tensors begin that some files have and no layer reads: keys and values of
    layers that read the cache of another."""
    return tuple(
        f"{layer_prefix(number)}self_attn.{name}."
        for number, layer in enumerate(config.layers)
        if layer.cache_of is not None
        for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


def check_shapes(
    found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str
) -> None:
    """Refuse arrays that are not, name by name and shape by shape, the expected ones.

    Raises:
        ModelLoadError: as for `check_tensors`.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise ModelLoadError(f"{where} lacks {_some(missing)}")
    unknown = [name for name in found if name not in expected]
    if unknown:
        raise ModelLoadError(
            f"{where} holds tensors that its configuration does not explain: {_some(unknown)}"
        )
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise ModelLoadError(
                f"{where}: the shape of {name} = {tuple(found[name])} is not allowed: "
                f"{shape}, by its configuration"
            )


def assemble_weights(
    source: TensorSource,
    config: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh,
    quantization: Quantization | None = None,
    packed: PackedReader | None = None,
) -> dict[str, Any]:
    """Read every parameter of `config` from `source` onto `mesh`.

    Args:
        source: a checkpoint that passed `check_tensors`.
        config: the model, with its KV heads copied for the mesh.
        dtype: of the weights.
        mesh: where they go.
        quantization: of linear layers; each is rounded as it is read, so that few of them are ever
            in memory in full.
        packed: reads linear layers as their blocks, where they have some.

    Returns:
        The weights in the tree of `declare(config, dtype)`; see `octavo.models.quantization`.
    """
    specs = declare(config, dtype)
    leaves, tree = jax.tree.flatten_with_path(specs, is_leaf=is_spec)

    def load(leaf: tuple[Any, ParamSpec]) -> Any:
        path, spec = path_keys(leaf[0]), leaf[1]
        in_blocks = None if packed is None else packed.read(path, spec)
        if in_blocks is not None:
            return in_blocks
        array = _load_parameter(source, path, spec, mesh)
        if quantization is None or not is_quantized(path, config):
            return array
        quantized = quantize_parameter(path, spec, array, quantization, mesh)
        return jax.block_until_ready(quantized)  # before the next is read: `array` is freed

    num_readers = min(MAX_READERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_readers, thread_name_prefix="octavo-load") as pool:
        arrays = list(pool.map(load, leaves))
    weights: dict[str, Any] = jax.tree.unflatten(tree, arrays)
    return weights


def _load_parameter(source: TensorSource, path: Any, spec: ParamSpec, mesh: Mesh) -> jax.Array:
    slices: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        whole: Index = tuple(
            slice(*part.indices(size)[:2])
            for part, size in zip(index or (), spec.shape, strict=True)
        )
        key = tuple((part.start, part.stop) for part in whole)
        if key not in slices:
            slices[key] = read_parameter(source, path, spec, whole)
        return slices[key]

    return jax.make_array_from_callback(spec.shape, spec.sharding(mesh), read)


def _some(names: Iterable[str], limit: int = 3) -> str:
    listed = [shorten(name) for name in names]
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + rest
