"""Where the weights of a variant stand in a decoder's tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")

VariantTree = Mapping[str, Any]
"""Weights in another variant by their places in the tree of `declare`: "layers", a dict a layer,
and "lm_head", also where the output layer is the embedding table, of which a step looks up a few
rows in float32. Any may be missing."""


def with_variants(weights: Mapping[str, Any], variants: VariantTree) -> dict[str, Any]:
    """The tree of weights with those of a variant instead of others in their places."""
    layers = tuple(
        {**layer, **some} for layer, some in zip(weights["layers"], variants["layers"], strict=True)
    )
    return {**weights, **variants, "layers": layers}


def abstract_on(mesh: Mesh, make: Callable[..., T], *args: Any) -> T:
    """What `make` makes of `args` on the one device of a mesh, as `jax.ShapeDtypeStruct`s."""
    sharding = NamedSharding(mesh, PartitionSpec())
    made: T = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(make, *args),
    )
    return made
