"""The parameters of a decoder: declared once with Flax, flattened into plain dicts of specs.

Every parameter's shape, dtype, logical axes and initial values are stated here and nowhere else:
loaders, random weights and shardings all read the specs. No Flax object outlives `declare`.
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
from octavo.sharding.rules import DEFAULT_RULES, AxisRules, LogicalAxes

Init = Literal["normal", "zeros", "ones"]
INIT_STDDEV = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One parameter, before it has values.

    Attributes:
        shape: sizes of its dimensions.
        dtype: of its elements.
        logical_axes: a name a dimension, for `AxisRules`.
        init: "normal" (standard deviation `INIT_STDDEV`), "zeros" or "ones".
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    logical_axes: LogicalAxes
    init: Init

    def sharding(self, mesh: Mesh, rules: AxisRules = DEFAULT_RULES) -> NamedSharding:
        """Where the parameter lives on `mesh`."""
        return rules.sharding(mesh, self.logical_axes, self.shape)


class _Layer(nnx.Module):
    """One decoder layer. Which parameters exist follows the config's parts.

    wqkv holds, for each KV head, the queries that read it, then its key, then its value; so a
    split over KV heads splits all three.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        hidden, mlp, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        kv_heads, group = config.num_kv_heads, config.num_queries_per_kv
        qkv_axes = ("kv_heads", None, "head_dim")

        self.attn_norm = _norm(hidden, "embed")
        self.wqkv = _param((hidden, kv_heads, group + 2, head_dim), dtype, ("embed", *qkv_axes))
        if config.qkv_bias:
            self.bqkv = _param((kv_heads, group + 2, head_dim), dtype, qkv_axes, "zeros")
        if config.qk_norm:
            self.q_norm = _norm(head_dim, "head_dim")
            self.k_norm = _norm(head_dim, "head_dim")
        self.wo = _param((kv_heads, group, head_dim, hidden), dtype, (*qkv_axes, "embed"))
        if config.attention_out_bias:
            self.bo = _param((hidden,), dtype, ("embed",), "zeros")
        if config.post_norms:
            self.post_attn_norm = _norm(hidden, "embed")

        self.mlp_norm = _norm(hidden, "embed")
        self.w_gate_up = _param((hidden, 2, mlp), dtype, ("embed", None, "mlp"))
        self.w_down = _param((mlp, hidden), dtype, ("mlp", "embed"))
        if config.mlp_bias:
            self.b_gate_up = _param((2, mlp), dtype, (None, "mlp"), "zeros")
            self.b_down = _param((hidden,), dtype, ("embed",), "zeros")
        if config.post_norms:
            self.post_mlp_norm = _norm(hidden, "embed")


class _Decoder(nnx.Module):
    """Everything but the layers, which are all alike, and one of them."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed = _param((vocab, hidden), dtype, ("vocab", "embed"))
        self.layer = _Layer(config, dtype)
        self.final_norm = _norm(hidden, "embed")
        if not config.tie_word_embeddings:
            self.lm_head = _param((hidden, vocab), dtype, ("embed", "vocab"))


def _param(
    shape: tuple[int, ...], dtype: jnp.dtype, logical_axes: LogicalAxes, init: Init = "normal"
) -> nnx.Param[Any]:
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=logical_axes, init=init)


def _norm(size: int, axis: str) -> nnx.Param[Any]:
    """A norm's multiplier: float32 in every model, because 1 + w loses w in bfloat16."""
    return _param((size,), jnp.dtype(jnp.float32), (axis,), "ones")


@lru_cache(maxsize=32)
def declare(config: ModelConfig, dtype: jnp.dtype) -> dict[str, Any]:
    """The specs of all parameters, in the tree the decoder takes its weights in.

    Args:
        config: the model.
        dtype: of all parameters but norms, which are float32.

    Returns:
        {"embed", "layers": one dict a layer, "final_norm", and "lm_head" if untied}, with a
        `ParamSpec` at each leaf. Shared between calls: do not change it.
    """
    module = nnx.eval_shape(lambda: _Decoder(config, jnp.dtype(dtype)))
    tree = _specs(nnx.to_flat_state(nnx.state(module)))
    layer = tree.pop("layer")
    tree["layers"] = tuple(dict(layer) for _ in range(config.num_layers))
    return tree


def _specs(flat_state: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, variable in flat_state:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        metadata = variable.get_metadata()
        node[path[-1]] = ParamSpec(
            shape=tuple(variable.shape),
            dtype=jnp.dtype(variable.dtype),
            logical_axes=tuple(metadata["logical_axes"]),
            init=metadata["init"],
        )
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
