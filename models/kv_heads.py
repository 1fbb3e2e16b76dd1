"""Copies of KV heads, made and unmade in weights that are already in the decoder's layout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.models.config import ModelConfig
from octavo.models.parameters import declare


def with_kv_heads(
    weights: Mapping[str, Any], config: ModelConfig, wanted: ModelConfig, mesh: Mesh
) -> dict[str, Any]:
    """Regroup the attention weights of `config` for `wanted`, which differs in copies alone.

    Args:
        weights: the tree of `config`. Not donated.
        config: what they are for.
        wanted: what they shall be for; nothing is computed if it has as many KV heads.
        mesh: where the weights are, and stay.

    Returns:
        The tree of `wanted`, sharing every array that did not change.
    """
    if wanted.num_kv_heads == config.num_kv_heads:
        return dict(weights)
    layers = []
    for layer in weights["layers"]:
        parts = {name: layer[name] for name in ("wqkv", "bqkv", "wo") if name in layer}
        # Head counts that divide differently share no partition: one layer at a time is whole on
        # every device for a moment.
        parts = jax.device_put(parts, NamedSharding(mesh, PartitionSpec()))
        specs = declare(wanted, layer["wqkv"].dtype)["layers"][0]
        shardings = {name: specs[name].sharding(mesh) for name in parts}
        regrouped = _regroup(parts, config=config, wanted=wanted)
        layers.append({**layer, **jax.device_put(regrouped, shardings)})
    return {**weights, "layers": tuple(layers)}


@partial(jax.jit, static_argnames=("config", "wanted"))
def _regroup(
    parts: dict[str, jax.Array], *, config: ModelConfig, wanted: ModelConfig
) -> dict[str, jax.Array]:
    group, new_group = config.num_queries_per_kv, wanted.num_queries_per_kv
    heads, head_dim = wanted.num_kv_heads, config.head_dim
    regrouped: dict[str, jax.Array] = {}
    for name, array in parts.items():
        if name == "wo":  # [Hkv, G, D, E]
            regrouped[name] = array.reshape(heads, new_group, head_dim, -1)
            continue
        # [E, Hkv, G + 2, D], or [Hkv, G + 2, D] for a bias.
        lead = array.shape[:-3]
        q = array[..., :group, :].reshape(*lead, heads, new_group, head_dim)
        kv = array[..., :: config.kv_head_copies, group:, :]
        kv = jnp.repeat(kv, wanted.kv_head_copies, axis=-3)
        regrouped[name] = jnp.concatenate([q, kv], axis=-2)
    return regrouped
