"""Weights that stay in the blocks in which their checkpoint holds them, on any mesh.

A parameter whose tensors do not all have blocks is dense, as without this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from octavo.models.config import ModelConfig
from octavo.models.loading.block_quantized import (
    BlockSource,
    fused_blocks,
    outputs_of,
    read_parts,
    tensors_with_blocks,
)
from octavo.models.loading.tensors import prefix_of
from octavo.models.parameters import ParamSpec, declare, is_spec
from octavo.models.quantization import EXPERTS, is_quantized, path_keys
from octavo.pallas_kernels.packed_linear import PackedWeight, abstract_packed, pack_blocks
from octavo.sharding.rules import DEFAULT_RULES


class PackedReader:
    """Reads linear layers of an open checkpoint as their blocks.

    Args:
        source: the checkpoint.
        config: the model, with its KV heads copied for the mesh.
        mesh: where they go.
    """

    def __init__(self, source: BlockSource, config: ModelConfig, mesh: Mesh) -> None:
        self._source = source
        self._config = config
        self._mesh = mesh

    def abstract_weights(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The tree of dense weights, as `jax.ShapeDtypeStruct`s, with packed ones in their places.

        Args:
            weights: of `abstract_weights(config, dtype, mesh)`.
        """
        specs = declare(self._config, weights["embed"].dtype)

        def one(path: Any, spec: ParamSpec, dense: Any) -> Any:
            packed = self.abstract(path_keys(path), spec)
            return dense if packed is None else packed

        tree: dict[str, Any] = jax.tree.map_with_path(one, specs, dict(weights), is_leaf=is_spec)
        return tree

    def has_blocks(self, dtype: jnp.dtype) -> bool:
        """Whether any parameter is read in blocks."""
        leaves, _ = jax.tree.flatten_with_path(declare(self._config, dtype), is_leaf=is_spec)
        return any(self.abstract(path_keys(path), spec) is not None for path, spec in leaves)

    def abstract(self, path: tuple[str | int, ...], spec: ParamSpec) -> PackedWeight | None:
        """What `read` reads, as `jax.ShapeDtypeStruct`s with shardings."""
        # Rows of an embedding table are looked up in blocks, too, whether or not it is multiplied.
        if not is_quantized(path, self._config) and path != ("embed",):
            return None
        _, kind = tensors_with_blocks(self._source, spec, prefix_of(path))
        outputs = outputs_of(spec)
        rows = [tensor.shape[0] for tensor in spec.layout.tensors]
        parts = len(rows) if spec.num_stacked else 1
        # Heads that are copied for the mesh, and parts of tensors, are not what is stored.
        if kind is None or sum(rows) != parts * math.prod(outputs):
            return None
        stacked = spec.shape[: spec.num_stacked]
        whole = abstract_packed(kind, (*stacked, *outputs), _inputs(spec), spec.dtype)

        def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            axes = _axes(spec, self._mesh)[: len(x.shape)]
            sharding = DEFAULT_RULES.sharding(
                self._mesh, (*axes, *(None,) * (len(x.shape) - len(axes))), x.shape
            )
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        weight: PackedWeight = jax.tree.map(placed, whole)
        # Each device multiplies by its own part of every expert's features: of whole blocks.
        dense = DEFAULT_RULES.sharding(self._mesh, spec.logical_axes, spec.shape)
        codes: NamedSharding = weight.codes.sharding  # type: ignore[assignment]
        if path[-1] in EXPERTS and any(dense.spec) != any(codes.spec):
            return None
        return weight

    def read(self, path: tuple[str | int, ...], spec: ParamSpec) -> PackedWeight | None:
        """One parameter, each device's part on it; None if it has no blocks.

        Raises:
            ModelLoadError: something that stands for no number.
        """
        wanted = self.abstract(path, spec)
        if wanted is None:
            return None
        names, kind = tensors_with_blocks(self._source, spec, prefix_of(path))
        assert kind is not None
        parts = read_parts(self._source, spec, names, kind)
        outputs, inputs = outputs_of(spec), _inputs(spec)
        if spec.num_stacked:
            each = [pack_blocks(part, outputs, inputs, spec.dtype) for part in parts]
            packed = jax.tree.map(lambda *arrays: np.stack(arrays), *each)
        else:
            packed = pack_blocks(fused_blocks(spec, parts), outputs, inputs, spec.dtype)
        weight: PackedWeight = jax.tree.map(_on_devices, packed, wanted)
        return weight


def _on_devices(array: np.ndarray, wanted: Any) -> jax.Array:
    sharding: NamedSharding = wanted.sharding
    return jax.make_array_from_callback(wanted.shape, sharding, lambda index: array[index])


def _inputs(spec: ParamSpec) -> tuple[int, ...]:
    """The inputs' dimensions of a parameter."""
    if spec.num_inputs is None:
        return spec.shape[1:]
    return spec.shape[spec.num_stacked : spec.num_stacked + spec.num_inputs]


def _axes(spec: ParamSpec, mesh: Mesh) -> tuple[str | None, ...]:
    """Logical axes of codes but for the last: of a stack, of the outputs, and of the blocks, which
    are split as the first of the inputs is."""
    names, first = spec.logical_axes, spec.num_stacked
    if spec.num_inputs is None:
        outputs, of_inputs, size = names[:1], names[1], spec.shape[1]
    else:
        outputs = names[first + spec.num_inputs :]
        of_inputs, size = names[first], spec.shape[first]
    axis = DEFAULT_RULES.mesh_axis(of_inputs)
    if axis is not None and size % mesh.shape[axis]:
        of_inputs = None
    return (*names[:first], *outputs, of_inputs)
