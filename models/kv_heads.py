"""Copies of KV heads, made and unmade in weights that are already in the decoder's layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.models.blocks.attention import REGROUPED, regroup
from octavo.models.config import ModelConfig
from octavo.models.parameters import declare


def with_kv_heads(
    weights: Mapping[str, Any], config: ModelConfig, wanted: ModelConfig, mesh: Mesh
) -> dict[str, Any]:
    """Regroup the attention weights of `config` for `wanted`, which differs in copies alone.

    Args:
        weights: the tree of `config`. Not donated.
        config: what they are for.
        wanted: what they shall be for; nothing is computed of layers with as many KV heads.
        mesh: where the weights are, and stay.

    Returns:
        The tree of `wanted`, sharing every array that did not change.
    """
    dtype = weights["embed"].dtype
    specs = declare(wanted, dtype)["layers"]
    layers = []
    for layer, old, new, spec in zip(
        weights["layers"], config.layers, wanted.layers, specs, strict=True
    ):
        if old == new:
            layers.append(layer)
            continue
        parts = {name: layer[name] for name in REGROUPED if name in layer}
        # Head counts that divide differently share no partition: one layer at a time is whole on
        # every device for a moment.
        parts = jax.device_put(parts, NamedSharding(mesh, PartitionSpec()))
        shardings = {name: spec[name].sharding(mesh) for name in parts}
        regrouped = regroup(parts, old=old.attention, new=new.attention)
        layers.append({**layer, **jax.device_put(regrouped, shardings)})
    return {**weights, "layers": tuple(layers)}
