"""Weights of which some are packed: where these stand in a decoder's tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from octavo.pallas_kernels.packed_linear import PackedWeight, PanelWeight, make_panels

Packed = Mapping[str, Any]
"""Packed weights by their places in the tree of `declare`: "layers", a dict a layer, and "lm_head",
also where the output layer is the embedding table, of which a step looks up a few rows in float32.
Any may be missing."""


def with_packed(weights: Mapping[str, Any], packed: Packed) -> dict[str, Any]:
    """The tree of weights with the packed ones instead of others in their places."""
    layers = tuple(
        {**layer, **some} for layer, some in zip(weights["layers"], packed["layers"], strict=True)
    )
    return {**weights, **packed, "layers": layers}


def in_panels(packed: Packed) -> Packed:
    """The packed weights laid out for steps of several rows. Nothing is donated."""
    laid: Packed = jax.tree.map(_make_panels, packed, is_leaf=_is_packed)
    return laid


def abstract_in_panels(packed: Packed, mesh: Mesh) -> Packed:
    """What `in_panels` makes, as `jax.ShapeDtypeStruct`s with shardings.

    Args:
        packed: of `jax.ShapeDtypeStruct`s, on `mesh`, which is of one device.
    """
    sharding = NamedSharding(mesh, PartitionSpec())

    def one(weight: PackedWeight) -> PanelWeight:
        made: PanelWeight = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(make_panels, weight),
        )
        return made

    laid: Packed = jax.tree.map(one, packed, is_leaf=_is_packed)
    return laid


def _is_packed(weight: Any) -> bool:
    return isinstance(weight, PackedWeight)


_make_panels = jax.jit(make_panels)
