"""The linear layers of a GGUF model as their file holds them, for steps of few rows on a CPU.

They come beside the float32 weights, which steps of many rows multiply with, and are the same
numbers. A parameter whose tensors are not all made of blocks has no block-quantized variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.models.config import ModelConfig
from octavo.models.loading.aligned import aligned_empty
from octavo.models.loading.gguf import GGUFSource
from octavo.models.loading.tensors import EMBED, LM_HEAD, layer_prefix
from octavo.models.weight_variants.tree import VariantTree
from octavo.pallas_kernels.cpu.block_quantized_linear import (
    BlockQuantizedWeight,
    Blocks,
    BlockType,
    abstract_block_quantized,
    common_type,
    lay_out_blocks,
)

_LAYER_TENSORS = {
    "wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "wo": ("self_attn.o_proj",),
    "w_gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "w_down": ("mlp.down_proj",),
}
_One = Callable[[str, tuple[str, ...], BlockType], BlockQuantizedWeight]
"""From a parameter's name, its tensors' and how their blocks are held together."""


class BlockQuantizedReader:
    """Reads the linear layers of an open GGUF file as their blocks.

    Args:
        source: the file.
        config: the model.
        mesh: of one device, which they go to.
    """

    def __init__(self, source: GGUFSource, config: ModelConfig, mesh: Mesh) -> None:
        self._source = source
        self._config = config
        self._sharding = NamedSharding(mesh, PartitionSpec())

    def abstract(self) -> VariantTree:
        """What `read` reads, as `jax.ShapeDtypeStruct`s with shardings."""

        def one(name: str, names: tuple[str, ...], kind: BlockType) -> BlockQuantizedWeight:
            num_inputs = self._source.shapes()[names[0]][1]
            outputs = _outputs(name, self._config)
            abstract = abstract_block_quantized(kind, outputs, num_inputs // kind.codes)
            weight: BlockQuantizedWeight = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding), abstract
            )
            return weight

        return self._tree(one)

    def read(self) -> VariantTree:
        """Reads them onto the device."""

        def one(name: str, names: tuple[str, ...], kind: BlockType) -> BlockQuantizedWeight:
            parts = [self._source.read_blocks(tensor).held_as(kind) for tensor in names]
            fused = _fused(name, parts, self._config)
            weight: BlockQuantizedWeight = jax.tree.map(
                lambda x: jax.device_put(x, self._sharding),
                lay_out_blocks(fused, _outputs(name, self._config), aligned_empty),
            )
            return weight

        return self._tree(one)

    def _tree(self, one: _One) -> VariantTree:
        """What `one` makes of each parameter whose tensors all have blocks."""

        def made(parameters: Mapping[str, tuple[str, ...]]) -> dict[str, BlockQuantizedWeight]:
            weights = {}
            for name, names in parameters.items():
                types = [self._source.block_type(tensor) for tensor in names]
                known = [each for each in types if each is not None]
                if len(known) == len(types):
                    weights[name] = one(name, names, common_type(known))
            return weights

        layers = []
        for layer in range(self._config.num_layers):
            prefix = layer_prefix(layer)
            layers.append(
                made(
                    {
                        name: tuple(f"{prefix}{part}.weight" for part in parts)
                        for name, parts in _LAYER_TENSORS.items()
                    }
                )
            )
        head = EMBED if self._config.tie_word_embeddings else LM_HEAD
        return {**made({"lm_head": (head,)}), "layers": tuple(layers)}


def _outputs(name: str, config: ModelConfig) -> tuple[int, ...]:
    """The outputs' dimensions of a parameter."""
    if name == "wqkv":
        return config.num_kv_heads, config.num_queries_per_kv + 2, config.head_dim
    if name == "w_gate_up":
        return 2, config.intermediate_size
    return (config.vocab_size if name == "lm_head" else config.hidden_size,)


def _fused(name: str, parts: list[Blocks], config: ModelConfig) -> Blocks:
    """The blocks of a parameter's outputs, of those of its tensors."""
    heads = config.num_kv_heads if name == "wqkv" else 1

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        # For each KV head the queries that read it, then its key, then its value.
        by_head = [array.reshape(heads, -1, *array.shape[1:]) for array in arrays]
        whole = np.concatenate(by_head, axis=1) if len(by_head) > 1 else by_head[0]
        return whole.reshape(-1, *whole.shape[2:])

    minima = [part.minimum for part in parts if part.minimum is not None]
    return Blocks(
        type=parts[0].type,
        codes=joined([part.codes for part in parts]),
        scale=joined([part.scale for part in parts]),
        minimum=joined(minima) if minima else None,
    )
