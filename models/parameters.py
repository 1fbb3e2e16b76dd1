"""The parameters of a decoder: declared once with Flax, flattened into plain dicts of specs.

A block declares its parameters as a Flax module of `param`s: shape, dtype, logical axes, initial
values, inputs of a product, and the checkpoint tensors they come from. Loaders, random weights,
quantization and shardings all read the specs. No Flax object outlives `declare`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from octavo.models.config import ModelConfig
from octavo.models.tensor_layouts import Tensor, TensorLayout, Transposed, Whole
from octavo.sharding.rules import DEFAULT_RULES, AxisRules, LogicalAxes

Init = Literal["normal", "zeros", "ones"]
INIT_STDDEV = 0.02
_METADATA = ("logical_axes", "init", "layout", "num_inputs", "num_stacked")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter, before it has values.

    Attributes:
        shape: sizes of its dimensions.
        dtype: of its elements.
        logical_axes: a name a dimension, for `AxisRules`.
        init: "normal" (standard deviation `INIT_STDDEV`), "zeros" or "ones".
        layout: the checkpoint tensors that it is made of, and how they lie in it.
        num_inputs: of a linear layer's weight, leading dimensions that its product contracts; None
            for other parameters, which are never quantized.
        num_stacked: dimensions before those, which say which of several such weights it is.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    logical_axes: LogicalAxes
    init: Init
    layout: TensorLayout
    num_inputs: int | None = None
    num_stacked: int = 0

    def sharding(self, mesh: Mesh, rules: AxisRules = DEFAULT_RULES) -> NamedSharding:
        """Where the parameter lives on `mesh`."""
        return rules.sharding(mesh, self.logical_axes, self.shape)


def param(
    shape: tuple[int, ...],
    dtype: jnp.dtype,
    logical_axes: LogicalAxes,
    layout: TensorLayout,
    *,
    init: Init = "normal",
    num_inputs: int | None = None,
    num_stacked: int = 0,
) -> nnx.Param[Any]:
    """One parameter of a block; arguments as the attributes of `ParamSpec`."""
    return nnx.Param(
        jax.ShapeDtypeStruct(shape, dtype),
        logical_axes=logical_axes,
        init=init,
        layout=layout,
        num_inputs=num_inputs,
        num_stacked=num_stacked,
    )


def flatten(module: nnx.Module) -> dict[str, ParamSpec]:
    """The parameters that a block's module declares, by name."""
    specs = {}
    for (name,), variable in nnx.to_flat_state(nnx.state(module)):
        metadata = variable.get_metadata()
        specs[str(name)] = ParamSpec(
            shape=tuple(variable.shape),
            dtype=jnp.dtype(variable.dtype),
            **{key: metadata[key] for key in _METADATA},
        )
    return specs


class _WholeModel(nnx.Module):
    """Everything but the layers."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        table = Tensor(
            name="model.embed_tokens.weight", gguf="token_embd.weight", shape=(vocab, hidden)
        )
        self.embed = param((vocab, hidden), dtype, ("vocab", "embed"), Whole(table))
        final_norm = config.final_norm.params(
            "final_norm", hidden, "embed", stored=config.final_norm_stored, gguf="output_norm"
        )
        for name, value in final_norm.items():
            setattr(self, name, value)
        if config.output_bias:
            bias = Tensor(name="lm_head.bias", gguf="output.bias", shape=(vocab,))
            self.lm_head_bias = param((vocab,), dtype, ("vocab",), Whole(bias), init="zeros")
        if not config.tie_word_embeddings:
            head = Tensor(name="lm_head.weight", gguf="output.weight", shape=(vocab, hidden))
            self.lm_head = param(
                (hidden, vocab), dtype, ("embed", "vocab"), Transposed(head), num_inputs=1
            )


@lru_cache(maxsize=32)
def declare(config: ModelConfig, dtype: jnp.dtype) -> dict[str, Any]:
    """The specs of all parameters, in the tree the decoder takes its weights in.

    Args:
        config: the model.
        dtype: of all parameters but norms, which are float32.

    Returns:
        {"embed", "layers": one dict a layer, "final_norm", "lm_head" if untied, "lm_head_bias" and
        what makes the inputs of layers if there are}, with a
        `ParamSpec` at each leaf. Shared between calls: do not change it.
    """
    dtype = jnp.dtype(dtype)
    tree: dict[str, Any] = {**flatten(_WholeModel(config, dtype))}
    if config.layer_inputs is not None:
        hidden, number = config.hidden_size, config.num_layers
        tree |= flatten(config.layer_inputs.parameters(hidden, number, dtype))
    alike = {layer: layer.declare(config.hidden_size, dtype) for layer in set(config.layers)}
    tree["layers"] = tuple(dict(alike[layer]) for layer in config.layers)
    return tree


def is_spec(node: object) -> bool:
    """Whether `node` is a leaf of a spec tree (for `jax.tree.map(..., is_leaf=is_spec)`)."""
    return isinstance(node, ParamSpec)


def abstract_weights(
    config: ModelConfig, dtype: jnp.dtype, mesh: Mesh, rules: AxisRules = DEFAULT_RULES
) -> Any:
    """The weights as `jax.ShapeDtypeStruct`s with shardings, to compile before they are loaded."""
    return jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=spec.sharding(mesh, rules)
        ),
        declare(config, dtype),
        is_leaf=is_spec,
    )


def num_bytes(weights: Any) -> int:
    """Bytes of a tree of arrays or `jax.ShapeDtypeStruct`s, however many devices hold them."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))


def num_parameters(specs: Mapping[str, Any]) -> int:
    """Elements in all parameters together."""
    total = 0
    for spec in jax.tree.leaves(specs, is_leaf=is_spec):
        size = 1
        for dim in spec.shape:
            size *= dim
        total += size
    return total
