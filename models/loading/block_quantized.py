"""The linear layers of a quantized model as its files hold them, for steps of few rows on a CPU.

They come beside the float32 weights, which steps of many rows multiply with, and are the same
numbers. A parameter whose tensors are not all made of blocks has no block-quantized variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.models.config import ModelConfig
from octavo.models.loading.aligned import aligned_empty
from octavo.models.loading.tensors import layer_prefix
from octavo.models.parameters import ParamSpec, declare
from octavo.models.tensor_layouts import Tensor
from octavo.models.weight_variants.tree import VariantTree
from octavo.pallas_kernels.cpu.block_quantized_linear import (
    BlockQuantizedWeight,
    abstract_block_quantized,
    lay_out_blocks,
)
from octavo.pallas_kernels.stored_blocks import Blocks, BlockType, common_type


class BlockSource(Protocol):
    """An open checkpoint some of whose tensors are made of blocks."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `TensorSource`."""
        ...

    def block_type(self, name: str) -> BlockType | None:
        """How the blocks of a tensor are held; None if it has none."""
        ...

    def read_blocks(self, name: str) -> Blocks:
        """All of a tensor that has blocks."""
        ...


_One = Callable[[ParamSpec, tuple[str, ...], BlockType], BlockQuantizedWeight]
"""From a parameter's spec, its tensors' names and how their blocks are held together."""


class BlockQuantizedReader:
    """Reads the linear layers of an open checkpoint as their blocks.

    Args:
        source: the checkpoint.
        config: the model.
        mesh: of one device, which they go to.
    """

    def __init__(self, source: BlockSource, config: ModelConfig, mesh: Mesh) -> None:
        self._source = source
        self._config = config
        self._sharding = NamedSharding(mesh, PartitionSpec())

    def abstract(self) -> VariantTree:
        """What `read` reads, as `jax.ShapeDtypeStruct`s with shardings."""

        shapes = self._source.shapes()

        def one(spec: ParamSpec, names: tuple[str, ...], kind: BlockType) -> BlockQuantizedWeight:
            num_inputs, stacked = shapes[names[0]][1], spec.shape[: spec.num_stacked]
            abstract = abstract_block_quantized(kind, outputs_of(spec), num_inputs // kind.codes)
            weight: BlockQuantizedWeight = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    (*stacked, *x.shape), x.dtype, sharding=self._sharding
                ),
                abstract,
            )
            return weight

        return self._tree(one)

    def read(self) -> VariantTree:
        """Reads them onto the device."""

        def one(spec: ParamSpec, names: tuple[str, ...], kind: BlockType) -> BlockQuantizedWeight:
            laid = _laid_out(spec, read_parts(self._source, spec, names, kind))
            weight: BlockQuantizedWeight = jax.tree.map(
                lambda x: jax.device_put(x, self._sharding), laid
            )
            return weight

        return self._tree(one)

    def _tree(self, one: _One) -> VariantTree:
        """What `one` makes of each linear layer whose tensors all have blocks."""

        def made(specs: Mapping[str, ParamSpec], prefix: str) -> dict[str, BlockQuantizedWeight]:
            weights = {}
            for name, spec in specs.items():
                names, kind = tensors_with_blocks(self._source, spec, prefix)
                if kind is not None:
                    weights[name] = one(spec, names, kind)
            return weights

        specs = declare(self._config, jnp.dtype(jnp.float32))
        layers = tuple(
            made(
                {name: spec for name, spec in layer.items() if spec.num_inputs is not None},
                layer_prefix(number),
            )
            for number, layer in enumerate(specs["layers"])
        )
        # A tied embedding is the output layer, outputs first.
        head = specs["embed" if self._config.tie_word_embeddings else "lm_head"]
        return {**made({"lm_head": head}, ""), "layers": layers}


def tensors_with_blocks(
    source: BlockSource, spec: ParamSpec, prefix: str
) -> tuple[tuple[str, ...], BlockType | None]:
    """The tensors of a parameter, and how their blocks are held together: None if one has none.

    Args:
        prefix: how their names begin.
    """
    names = tuple(prefix + tensor.name for tensor in spec.layout.tensors)
    types = [source.block_type(name) for name in names]
    known = [each for each in types if each is not None]
    return names, common_type(known) if len(known) == len(types) else None


def read_parts(
    source: BlockSource, spec: ParamSpec, names: tuple[str, ...], kind: BlockType
) -> list[Blocks]:
    """The blocks of each tensor of a parameter, held as `kind` says."""
    return [
        _rows_of(tensor, source.read_blocks(name)).held_as(kind)
        for tensor, name in zip(spec.layout.tensors, names, strict=True)
    ]


def _rows_of(tensor: Tensor, stored: Blocks) -> Blocks:
    """The blocks of one tensor, of all that are stored under its name."""
    if tensor.is_stored_as_it_is:
        return stored
    return replace(
        stored,
        codes=tensor.of_stored(stored.codes),
        scale=tensor.of_stored(stored.scale),
        minimum=None if stored.minimum is None else tensor.of_stored(stored.minimum),
    )


def outputs_of(spec: ParamSpec) -> tuple[int, ...]:
    """The outputs' dimensions of a parameter."""
    if spec.num_inputs is None:
        return spec.shape[:1]
    return spec.shape[spec.num_stacked + spec.num_inputs :]


def _laid_out(spec: ParamSpec, parts: list[Blocks]) -> BlockQuantizedWeight:
    """A parameter as a product reads it, of its tensors' blocks; of experts, one a tensor."""
    if not spec.num_stacked:
        return lay_out_blocks(fused_blocks(spec, parts), outputs_of(spec), aligned_empty)
    each = [lay_out_blocks(part, outputs_of(spec)) for part in parts]

    def stack(*arrays: np.ndarray) -> np.ndarray:
        return np.stack(arrays, out=aligned_empty((len(arrays), *arrays[0].shape), arrays[0].dtype))

    laid: BlockQuantizedWeight = jax.tree.map(stack, *each)
    return laid


def fused_blocks(spec: ParamSpec, parts: list[Blocks]) -> Blocks:
    """The blocks of a parameter's outputs, of those of its tensors."""
    groups = spec.layout.num_interleaved

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        by_group = [array.reshape(groups, -1, *array.shape[1:]) for array in arrays]
        whole = np.concatenate(by_group, axis=1) if len(by_group) > 1 else by_group[0]
        return whole.reshape(-1, *whole.shape[2:])

    minima = [part.minimum for part in parts if part.minimum is not None]
    return Blocks(
        type=parts[0].type,
        codes=joined([part.codes for part in parts]),
        scale=joined([part.scale for part in parts]),
        minimum=joined(minima) if minima else None,
    )
