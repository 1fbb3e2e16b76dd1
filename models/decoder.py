"""A decoder-only transformer as pure functions over a tree of weights.

Attention is the caller's: it owns the cache and knows which row is which sequence's. The layers
here see a flat run of T tokens, whatever mixture of prefill and decode they are.

Shape suffixes: T tokens, S sampled rows, V vocabulary, E hidden, F MLP, Hq and Hkv heads, G query
heads a KV head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from octavo.models.config import LayerAttention, LayerKind, ModelConfig
from octavo.models.layers import (
    activate,
    apply_rotary,
    linear,
    rms_norm,
    rotary_tables,
    row_major,
    softcap,
)
from octavo.pallas_kernels.linear_weight import LinearWeight, embedding_table, linear_weight

Weights = Mapping[str, Any]
"""The tree of arrays that `octavo.models.parameters.declare` describes, in one of its variants: a
linear layer's weight is an array or another `LinearWeight`, and there may be `LOGIT_BOUNDS`."""
LOGIT_BOUNDS = "logit_bounds"
"""Place in the tree of what finds greedy tokens without all logits; see `greedy_token`."""


class Attend(Protocol):
    """Writes a layer's new keys and values into its cache and attends over the cache."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: Any, attention: LayerAttention, /
    ) -> tuple[jax.Array, Any]:
        """q [T, Hq, D], k and v [T, Hkv, D] -> (out [T, Hq, D], the layer's new cache)."""
        ...


def embed(weights: Weights, config: ModelConfig, token_ids: jax.Array) -> jax.Array:
    """Embeddings of tokens.

    Args:
        token_ids: [T] int32, each 0 ≤ id < V.

    Returns:
        [T, E] in the weights' dtype, which is the activation dtype of the whole model.
    """
    with jax.named_scope("embed"):
        x = embedding_table(weights["embed"]).rows(token_ids)
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        return x


def run_layers(
    weights: Weights,
    config: ModelConfig,
    x: jax.Array,
    positions: jax.Array,
    attend: Attend,
    caches: tuple[Any, ...],
) -> tuple[jax.Array, tuple[Any, ...]]:
    """All layers, one after another.

    The loop is unrolled, because a scan over layers copies the cache, but each kind of layer is
    traced and lowered once.

    Args:
        x: [T, E].
        positions: [T] int32, of each token in its own sequence.
        attend: see `Attend`; it may close over traced arrays. Pass a `jax.tree_util.Partial` to
            hand them over as arguments instead.
        caches: one pytree a layer.

    Returns:
        x [T, E] before the final norm, and the new caches.
    """
    if not isinstance(attend, jax.tree_util.Partial):
        attend = jax.tree_util.Partial(attend)
    with jax.named_scope("rotary"):
        tables = {
            kind: rotary_tables(positions, config.layer_rope(kind), config.head_dim)
            for kind in sorted(set(config.layer_kinds))
        }
        # Fused into their users, XLA's CPU backend would compute them for each head of each layer.
        tables = jax.lax.optimization_barrier(tables)
    new_caches = []
    for index, kind in enumerate(config.layer_kinds):
        cos, sin = tables[kind]
        x, cache = _layer(
            weights["layers"][index], x, cos, sin, caches[index], attend, config=config, kind=kind
        )
        new_caches.append(cache)
    return x, tuple(new_caches)


def unembed(weights: Weights, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits of the next token.

    Args:
        hidden: [S, E], as `run_layers` returns it: the final norm is applied here.

    Returns:
        [S, V] float32.
    """
    with jax.named_scope("unembed"):
        normed = rms_norm(hidden, weights["final_norm"], config.rms_norm_eps)
        logits = _output_layer(weights).apply(normed, out_dtype=jnp.dtype(jnp.float32))
        if config.final_logit_softcap is not None:
            logits = softcap(logits, config.final_logit_softcap)
        return logits


def greedy_token(
    weights: Weights, config: ModelConfig, hidden: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The likeliest next token without all logits, of weights that have `LOGIT_BOUNDS`.

    Args:
        hidden: [S, E] float32, as for `unembed`.
        active: bool [S], the rows that matter.

    Returns:
        Tokens int32 [S], and bool [S], whether they are certain: where not, `unembed` tells.
    """
    with jax.named_scope("bounded_argmax"):
        normed = rms_norm(hidden, weights["final_norm"], config.rms_norm_eps)
        token, is_certain = weights[LOGIT_BOUNDS].argmax(normed, weights["embed"], active)
        return token, is_certain


def _output_layer(weights: Weights) -> LinearWeight:
    # Tied ones may come with an output layer of their own, where its order in memory matters.
    if "lm_head" in weights:
        return linear_weight(weights["lm_head"])
    return embedding_table(weights["embed"])


@partial(jax.jit, static_argnames=("config", "kind"))
def _layer(
    weights: Weights,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: Any,
    attend: Attend,
    *,
    config: ModelConfig,
    kind: LayerKind,
) -> tuple[jax.Array, Any]:
    with jax.named_scope("attention"):
        out, cache = _attention(weights, x, cos, sin, cache, attend, config, kind)
        if config.post_norms:
            out = rms_norm(out, weights["post_attn_norm"], config.rms_norm_eps)
        x = x + out
    with jax.named_scope("mlp"):
        out = _mlp(weights, x, config)
        if config.post_norms:
            out = rms_norm(out, weights["post_mlp_norm"], config.rms_norm_eps)
        x = x + out
    return x, cache


def _attention(
    weights: Weights,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    cache: Any,
    attend: Attend,
    config: ModelConfig,
    kind: LayerKind,
) -> tuple[jax.Array, Any]:
    num_tokens, group = x.shape[0], config.num_queries_per_kv
    heads = (num_tokens, config.num_heads, config.head_dim)
    grouped = (num_tokens, config.num_kv_heads, group, config.head_dim)

    normed = rms_norm(x, weights["attn_norm"], config.rms_norm_eps)
    qkv = row_major(linear(normed, weights["wqkv"]))  # [T, Hkv, G + 2, D]
    if config.qkv_bias:
        qkv = qkv + weights["bqkv"][None]
    q = qkv[:, :, :group].reshape(heads)
    k, v = qkv[:, :, group], qkv[:, :, group + 1]
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, weights["k_norm"], config.rms_norm_eps)
    q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)

    out, cache = attend(q, k, v, cache, config.attention(config.layer_kinds.index(kind)))
    out = linear(out.astype(x.dtype).reshape(grouped), weights["wo"], num_inputs=3)
    if config.attention_out_bias:
        out = out + weights["bo"][None]
    return out, cache


def _mlp(weights: Weights, x: jax.Array, config: ModelConfig) -> jax.Array:
    normed = rms_norm(x, weights["mlp_norm"], config.rms_norm_eps)
    gate_up = linear(normed, weights["w_gate_up"])  # [T, 2, F]
    if config.mlp_bias:
        gate_up = gate_up + weights["b_gate_up"][None]
    hidden = activate(gate_up[:, 0], config.activation) * gate_up[:, 1]
    out = linear(hidden, weights["w_down"])
    if config.mlp_bias:
        out = out + weights["b_down"][None]
    return out
