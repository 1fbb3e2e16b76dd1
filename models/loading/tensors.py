"""What a checkpoint must hold, and how its tensors become parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from octavo.models.config import ModelConfig
from octavo.models.parameters import ParamSpec, declare, is_spec
from octavo.models.tensor_layouts import Index, Tensor

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


class TensorSource(Protocol):
    """An open checkpoint.

    Attributes:
        config: the model that the checkpoint describes.
        norms_include_offset: whether stored norm weights already include what `RMSNorm.offset`
            adds.
    """

    config: ModelConfig
    norms_include_offset: bool

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's name and shape, in Hugging Face's names and layouts."""
        ...

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of one tensor as float32, float16 or bfloat16; it may view the file."""
        ...


def expected_tensors(config: ModelConfig) -> dict[str, tuple[Tensor, str]]:
    """Every tensor that a checkpoint of `config` must hold.

    Returns:
        Its name -> the tensor, and its name in a GGUF file.
    """
    specs = declare(config, jnp.dtype(jnp.float32))
    top = {name: spec for name, spec in specs.items() if name != "layers"}
    found = {tensor.name: (tensor, tensor.gguf) for tensor in _tensors(top)}
    alike: dict[int, list[Tensor]] = {}
    for number, layer in enumerate(specs["layers"]):
        key = id(config.layers[number])
        if key not in alike:
            alike[key] = _tensors(layer)
        for tensor in alike[key]:
            found[layer_prefix(number) + tensor.name] = tensor, f"blk.{number}.{tensor.gguf}"
    return found


def _tensors(specs: Mapping[str, Any]) -> list[Tensor]:
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return [tensor for spec in leaves for tensor in spec.layout.tensors]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of `config` must hold."""
    return {name: tensor.stored_shape for name, (tensor, _) in expected_tensors(config).items()}


def read_output_rows(
    source: TensorSource, config: ModelConfig, token_ids: Sequence[int]
) -> NDArray[np.float32]:
    """What the output layer multiplies hidden states with for some tokens: float32[tokens, E]."""
    name = EMBEDDING if config.tie_word_embeddings else LM_HEAD
    whole = slice(0, config.hidden_size, 1)
    rows = [source.read(name, (slice(i, i + 1, 1), whole)) for i in token_ids]
    return np.concatenate([np.asarray(row, np.float32) for row in rows])


def layer_prefix(layer: int) -> str:
    """How the names of layer `layer`'s tensors begin."""
    return f"model.layers.{layer}."


def prefix_of(path: tuple[str | int, ...]) -> str:
    """How the names of the tensors begin that the parameter at `path` is made of."""
    return layer_prefix(int(path[1])) if path[0] == "layers" else ""


def read_parameter(
    source: TensorSource, path: tuple[str | int, ...], spec: ParamSpec, index: Index
) -> np.ndarray:
    """A slice of one parameter, assembled from the tensors it is fused from.

    Args:
        source: the checkpoint.
        path: where the parameter is in the weights, such as ("layers", 3, "wqkv").
        spec: its spec, with KV heads copied if they are to be.
        index: the slice, in the parameter's own dimensions.

    Returns:
        An array of the slice's shape in `spec.dtype`; it may view the file.
    """
    return spec.layout.read(source, prefix_of(path), index, spec.dtype)
