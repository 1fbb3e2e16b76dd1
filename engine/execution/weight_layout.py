"""The order in which weights lie in memory, where a device's products want another than ours.

On a TPU a product's weight is tiled over its contracted dimension and its last one. `w_gate_up`
[E, 2, F] and `wqkv` [E, Hkv, G + 2, D] have small dimensions between these two: left in their own
order, XLA copies both into tiles in every dispatch (574 MB of temporaries for two layers of the 8B
model, 2.8 MB when they lie right). Only the order in memory changes, no shape and no product.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.layout import Format, Layout

SPLIT_OUTPUTS = frozenset({"wqkv", "w_gate_up"})
"""Weights whose outputs are several dimensions."""
PLATFORMS = frozenset({"tpu"})


def weight_formats(weights: Any) -> Any:
    """How each weight should lie.

    Args:
        weights: tree of arrays or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
        The same tree of `Format`s and, where the device's own choice is right, shardings.
    """
    return jax.tree.map_with_path(_format, weights)


def lay_out(weights: Any) -> Any:
    """The weights in the order that their device wants; those put into another are donated."""

    def place(array: jax.Array, wanted: Any) -> jax.Array:
        return jax.device_put(array, wanted, donate=True) if isinstance(wanted, Format) else array

    return jax.tree.map(place, weights, weight_formats(weights))


def abstract(weights: Any) -> Any:
    """The weights as `jax.ShapeDtypeStruct`s, as `lay_out` would place them: to compile for."""
    return jax.tree.map(
        lambda x, wanted: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted),
        weights,
        weight_formats(weights),
    )


def contracted_last_but_one(num_dims: int) -> Layout:
    """Row-major, but for the first dimension, which comes next to the last."""
    return Layout((*range(1, num_dims - 1), 0, num_dims - 1))


def _format(path: Any, weight: Any) -> Any:
    # A quantized weight's parts have their inputs last, where a product's tiles want them.
    name = getattr(path[-1], "key", None)
    device = next(iter(weight.sharding.device_set))
    if device.platform not in PLATFORMS or weight.ndim < 3 or name not in SPLIT_OUTPUTS:
        return weight.sharding
    return Format(contracted_last_but_one(weight.ndim), weight.sharding)
