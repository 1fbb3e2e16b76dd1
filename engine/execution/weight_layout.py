"""How weights lie in memory, where a device's products want them otherwise than declared.

On a TPU a product's weight is tiled over its contracted dimension and its last one. `w_gate_up`
[E, 2, F] and `wqkv` [E, Hkv, G + 2, D] have small dimensions between these two: left in their own
order, XLA copies both into tiles in every dispatch (574 MB of temporaries for two layers of the 8B
model, 2.8 MB when they lie right). Only the order in memory changes, no shape and no product.

On a CPU whose products Eigen computes (`product_library.py`), an embedding table that is also the
output layer is kept a second time, inputs first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from octavo.pallas_kernels.product_library import ProductLibrary

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


def lay_out(weights: Any, library: ProductLibrary = "ynnpack") -> Any:
    """The weights as their device wants them; those put into another order are donated.

    Args:
        library: that computes a CPU's products.
    """

    def place(array: jax.Array, wanted: Any) -> jax.Array:
        return jax.device_put(array, wanted, donate=True) if isinstance(wanted, Format) else array

    placed = jax.tree.map(place, weights, weight_formats(weights))
    if not _lacks_output_layer(placed, library):
        return placed
    return {**placed, "lm_head": _transpose(placed["embed"])}


def abstract(weights: Any, library: ProductLibrary = "ynnpack") -> Any:
    """The weights as `jax.ShapeDtypeStruct`s, as `lay_out` would place them: to compile for."""
    placed = jax.tree.map(
        lambda x, wanted: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted),
        weights,
        weight_formats(weights),
    )
    if not _lacks_output_layer(placed, library):
        return placed
    table = placed["embed"]
    output_layer = jax.ShapeDtypeStruct(
        table.shape[::-1], table.dtype, sharding=_transposed(table.sharding)
    )
    return {**placed, "lm_head": output_layer}


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


def _lacks_output_layer(weights: Any, library: ProductLibrary) -> bool:
    return library == "eigen" and "lm_head" not in weights


def _transposed(sharding: NamedSharding) -> NamedSharding:
    """Of a transposed matrix."""
    spec = (*sharding.spec, None, None)[:2]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec[::-1]))


def _transpose(table: jax.Array) -> jax.Array:
    """A matrix transposed, split over its devices as it is."""
    assert isinstance(table.sharding, NamedSharding)
    return jax.jit(jnp.transpose, out_shardings=_transposed(table.sharding))(table)
