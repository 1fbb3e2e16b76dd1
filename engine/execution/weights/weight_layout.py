"""How weights lie in memory, where a device's products want them otherwise than declared.

On a TPU a product's weight is tiled over its contracted dimension and one of its outputs'. Left in
another order, XLA copies it in every dispatch. Only the order in memory changes, no shape and no
product; it has to suit decode programs of every width and mixed ones, which share the weights:

- `w_gate_up` [E, 2, F], `wqkv` [E, Hkv, G + 2, D] and `delta_in` [E, Hkv, …] have small dimensions
  between E and the last (574 MB of temporaries for two layers of the 8B model, 2.8 MB when they lie
  right; 2.4 of 17.9 GB that Qwen3.5 9B's decode copied in every dispatch).
- Where a device's part of the last dimension does not fill whole lanes (D of 64; F of 704, of
  DeepSeek-V2-Lite on four devices), they have E last: no program copies them then, and no lane is
  padding (200 MB less for the 1B model). Else `models.layers.row_major` keeps programs of 128
  tokens and more from copying `wqkv`.
- `embed` [V, E] is read row by row, and stacks of experts [X, E, F] by ragged products. Where the
  last dimension does not fill whole lanes (2,880), XLA's own choice is another order, in which less
  is padding, and every dispatch copied them (290 MB of gpt-oss-20b on each of four devices).
- `lm_head` [E, V] has E last, as a tied embedding table has: programs of one row read it so.

A TPU7x holds bfloat16 in tiles of 16 x 128, but is given a program's arguments in tiles of 8 x 128:
XLA copied all weights of a decode program before its loop (13.4 GB on the 8B model). Programs
with loops are compiled to keep the smaller tiles (`loop_compiler_options`).

On a CPU whose products Eigen computes (`product_library.py`), an embedding table that is also the
output layer is kept a second time, inputs first.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from octavo.engine.execution.step_spec import StepShape
from octavo.pallas_kernels.compat import SMALL_TILES, has_memory_order, in_memory_order
from octavo.pallas_kernels.cpu.product_library import ProductLibrary

PLATFORMS = frozenset({"tpu"})
LANES = 128
SPLIT = frozenset({"wqkv", "w_gate_up", "delta_in", "delta_rates"})
"""Weights whose outputs have several dimensions."""
ROW_MAJOR = frozenset({"embed", "experts_gate", "experts_up", "experts_down"})
LARGE_TILES = frozenset({"TPU7x"})
"""Device kinds whose tiles of bfloat16 are 16 x 128 unless told otherwise."""


def weight_formats(weights: Any) -> Any:
    """How each weight should lie.

    Args:
        weights: tree of arrays or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
        The same tree of placements (`in_memory_order`) and, where the device's own choice is
        right, shardings.
    """
    return jax.tree.map_with_path(_format, weights)


def lay_out(weights: Any, library: ProductLibrary = "ynnpack") -> Any:
    """The weights as their device wants them; those put into another order are donated.

    Args:
        library: that computes a CPU's products.
    """

    def place(array: jax.Array, wanted: Any) -> jax.Array:
        return jax.device_put(array, wanted, donate=True) if has_memory_order(wanted) else array

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


def loop_compiler_options(shape: StepShape, device_kind: str) -> dict[str, str]:
    """What a step whose loops read weights wants of the compiler: decode, and prompts' scores.

    A mixed program that reads each weight once keeps the larger tiles, and copies none.

    Args:
        device_kind: as JAX names it.
    """
    loops = shape.is_decode or not shape.is_greedy
    if not loops or device_kind not in LARGE_TILES:
        return {}
    return dict(SMALL_TILES)


def contracted_last(num_dims: int) -> tuple[int, ...]:
    """Row-major, but for the first dimension, which comes last."""
    return (*range(1, num_dims), 0)


def contracted_last_but_one(num_dims: int) -> tuple[int, ...]:
    """Row-major, but for the first dimension, which comes next to the last."""
    return (*range(1, num_dims - 1), 0, num_dims - 1)


def _format(path: Any, weight: Any) -> Any:
    # A quantized weight's parts have their inputs last, where a product's tiles want them.
    name = getattr(path[-1], "key", None)
    device = next(iter(weight.sharding.device_set))
    if device.platform not in PLATFORMS or name not in {*SPLIT, *ROW_MAJOR, "lm_head"}:
        return weight.sharding
    if name in ROW_MAJOR:
        return in_memory_order(weight.sharding, tuple(range(weight.ndim)))
    width = weight.sharding.shard_shape(weight.shape)[-1]
    if name == "lm_head" or width % LANES:
        return in_memory_order(weight.sharding, contracted_last(weight.ndim))
    return in_memory_order(weight.sharding, contracted_last_but_one(weight.ndim))


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
