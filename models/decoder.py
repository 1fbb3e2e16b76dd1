"""A decoder-only transformer as pure functions over a tree of weights.

Attention is the caller's: it owns the cache and knows which row is which sequence's. The layers
here see a flat run of T tokens, whatever mixture of prefill and decode they are.

Shape suffixes: T tokens, S sampled rows, V vocabulary, E hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from octavo.models.blocks.attention import Attend
from octavo.models.blocks.experts import Experts, RunExperts
from octavo.models.blocks.layer import FeedForward, apply_layer
from octavo.models.blocks.layer_inputs import Tail
from octavo.models.blocks.mixers import Mixer
from octavo.models.blocks.norms import Norms
from octavo.models.blocks.state_rows import StateRows
from octavo.models.cache_groups import CachePlace
from octavo.models.config import ModelConfig
from octavo.models.layers import Rotary, rotary_tables, softcap
from octavo.pallas_kernels.linear_weight import LinearWeight, embedding_table, linear_weight

Weights = Mapping[str, Any]
"""The tree of arrays that `octavo.models.parameters.declare` describes, in one of its variants: a
linear layer's weight is an array or another `LinearWeight`, and there may be `LOGIT_BOUNDS`."""
LOGIT_BOUNDS = "logit_bounds"
"""Place in the tree of what finds greedy tokens without all logits; see `greedy_token`."""


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


def layer_inputs(
    weights: Weights, config: ModelConfig, token_ids: jax.Array, x: jax.Array
) -> jax.Array | None:
    """Inputs of their own that layers take; None of a model without.

    Args:
        token_ids: as for `embed`.
        x: [T, E], what `embed` made of them.

    Returns:
        [L, T, P] in x's dtype; see `LayerInputs`.
    """
    if config.layer_inputs is None:
        return None
    with jax.named_scope("layer_inputs"):
        return config.layer_inputs.apply(weights, token_ids, x)


def run_layers(
    weights: Weights,
    config: ModelConfig,
    x: jax.Array,
    positions: jax.Array,
    attend: Attend | Sequence[Attend | StateRows],
    caches: tuple[Any, ...],
    places: Sequence[CachePlace] | None = None,
    run_experts: RunExperts | None = None,
    layer_inputs: jax.Array | None = None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    """All layers, one after another.

    This is where embeddings enter. `embed` makes them of token ids; a caller that has others, of
    an image for example, passes those instead.

    The loop is unrolled, because a scan over layers copies the cache, but layers with equal specs
    are traced and lowered once.

    Args:
        x: [T, E] input embeddings, in the weights' dtype.
        positions: [T] int32, of each token in its own sequence.
        attend: see `Attend`; it may close over traced arrays. Pass a `jax.tree_util.Partial` to
            hand them over as arguments instead. A sequence has one for each cache group, and last
            the rows of recurrent states if there are any.
        caches: pytrees.
        places: which of them each of `config.own_caches()` is, and which group's attention reads
            it; None if there is one for each, and one attention.
        run_experts: multiplies tokens by their experts; a `jax.tree_util.Partial`, as for `attend`.
            None does so plainly, and lets every token count.
        layer_inputs: what `layer_inputs` returns.

    Returns:
        x [T, E] before the final norm, and the new caches.
    """
    by_group = [
        each if isinstance(each, jax.tree_util.Partial | StateRows) else jax.tree_util.Partial(each)
        for each in (attend if isinstance(attend, Sequence) else (attend,))
    ]
    if places is None:
        places = [CachePlace(array, 0) for array in range(len(caches))]
    with jax.named_scope("rotary"):
        wanted = dict.fromkeys(layer.rotary for layer in config.layers)
        tables = [None if key is None else rotary_tables(positions, *key) for key in wanted]
        # Fused into their users, XLA's CPU backend would compute them for each head of each layer.
        rotary = dict(zip(wanted, jax.lax.optimization_barrier(tables), strict=True))
    new_caches = list(caches)
    for index, (layer, used) in enumerate(zip(config.layers, config.cache_places(), strict=True)):
        its_places = [places[cache] for cache in used]
        x, its_caches = _layer(
            weights["layers"][index],
            x,
            rotary[layer.rotary],
            tuple(new_caches[place.array] for place in its_places),
            tuple(by_group[place.group] for place in its_places),
            run_experts if isinstance(layer.feed_forward, Experts) else None,
            None if layer_inputs is None else layer_inputs[index],
            mixer=layer.mixer,
            feed_forward=layer.feed_forward,
            norms=layer.norms,
            tail=layer.tail,
        )
        for place, cache in zip(its_places, its_caches, strict=True):
            new_caches[place.array] = cache
    return x, tuple(new_caches)


def unembed(weights: Weights, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits of the next token.

    Args:
        hidden: [S, E], as `run_layers` returns it: the final norm is applied here.

    Returns:
        [S, V] float32.
    """
    with jax.named_scope("unembed"):
        normed = config.final_norm(hidden, weights, "final_norm")
        logits = _output_layer(weights).apply(normed, out_dtype=jnp.dtype(jnp.float32))
        if config.output_bias:
            logits = logits + weights["lm_head_bias"].astype(jnp.float32)[None]
        if config.logit_scale is not None:
            logits = logits * jnp.float32(config.logit_scale)
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
        normed = config.final_norm(hidden, weights, "final_norm")
        token, is_certain = weights[LOGIT_BOUNDS].argmax(normed, weights["embed"], active)
        return token, is_certain


def _output_layer(weights: Weights) -> LinearWeight:
    # Tied ones may come with an output layer of their own, where its order in memory matters.
    if "lm_head" in weights:
        return linear_weight(weights["lm_head"])
    return embedding_table(weights["embed"])


@partial(jax.jit, static_argnames=("mixer", "feed_forward", "norms", "tail"))
def _layer(
    weights: Weights,
    x: jax.Array,
    rotary: Rotary | None,
    caches: tuple[Any, ...],
    attend: tuple[Attend | StateRows, ...],
    run_experts: RunExperts | None,
    layer_input: jax.Array | None,
    *,
    mixer: Mixer | None,
    feed_forward: FeedForward | None,
    norms: Norms,
    tail: Tail | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    return apply_layer(
        mixer,
        feed_forward,
        norms,
        weights,
        x,
        rotary,
        caches,
        attend,
        run_experts,
        tail,
        layer_input,
    )
