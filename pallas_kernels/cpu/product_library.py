"""Which library computes a CPU's float32 products: XLA's compiler has two.

YNNPACK, which it takes unasked, and Eigen. Neither is faster everywhere: on one core of an Intel
Xeon (AVX-512) the layers of SmolLM2 take 98 ms with Eigen and 136 with YNNPACK at 64 rows, 1,430
and 1,690 at 1,024, on one of an EPYC (Zen 4) eight of them 26 and 35 at 64 rows, 199 and 209 at
512; on two cores YNNPACK shares the work better. So tuning tables say which a machine has been
measured to want with that many cores (`octavo tune --part products`), and what no table knows is
left to the compiler.

The choice is a program's; one product of a program of YNNPACK's can be Eigen's (`eigen_linear`).

Eigen wants a weight's inputs first: given `[outputs, inputs]`, XLA transposes the whole weight in
every step. An output layer that is the embedding table lies so, and is kept a second time as
`[inputs, outputs]` where Eigen computes it.

Reductions stay YNNPACK's with either, and with them the products that they end: attention's decode
takes 1.6 times as long without.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from octavo.pallas_kernels import tuning
from octavo.pallas_kernels.compat import multiplies_bfloat16

ProductLibrary = tuning.ProductLibrary
"""The name of one: "ynnpack" or "eigen"."""
BLOCK_QUANTIZED_ROWS = 4
"""Rows of decode steps that read block-quantized weights, where nobody has measured more."""


def choose_product_library(weights: Any, kv_dtype: Any) -> ProductLibrary:
    """The library that the steps of an engine are compiled with.

    Args:
        weights: tree of arrays or `jax.ShapeDtypeStruct`s with shardings.
        kv_dtype: of the KV pools.

    Returns:
        What was measured to be faster on as many cores of this CPU, where everything is float32;
        else "ynnpack", as XLA has it.

    Raises:
        InvalidConfigError: a tuning table cannot be read.
    """
    products = _measured(weights, kv_dtype)
    return "ynnpack" if products is None else products.library


def choose_int8_split(weights: Any) -> tuning.Span | None:
    """The least and the most tokens of steps that multiply with int8-split weights.

    Args:
        weights: tree of arrays or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
        What was measured on as many cores of this CPU, where everything is float32 on one device;
        else None, no step.

    Raises:
        InvalidConfigError: a tuning table cannot be read.
    """
    products = _measured_on_one(weights)
    return None if products is None else products.int8_split


def choose_block_quantized_rows(weights: Any) -> int:
    """The most rows of decode steps that read block-quantized weights, if there are any.

    Args:
        weights: tree of arrays or `jax.ShapeDtypeStruct`s with shardings.

    Raises:
        InvalidConfigError: a tuning table cannot be read.
    """
    products = _measured_on_one(weights)
    measured = None if products is None else products.block_quantized
    return BLOCK_QUANTIZED_ROWS if measured is None else measured


def choose_bounded_argmax(weights: Any) -> tuning.Span | None:
    """The least and the most rows of steps that find likeliest tokens by bounds of logits, if
    YNNPACK computes their products.

    Args:
        weights: tree of arrays or `jax.ShapeDtypeStruct`s with shardings.

    Returns:
        As `choose_int8_split`, and None where this JAX does not multiply bfloat16 fast.

    Raises:
        InvalidConfigError: a tuning table cannot be read.
    """
    products = _measured_on_one(weights)
    return products.bounded_argmax if products is not None and multiplies_bfloat16() else None


def _measured_on_one(weights: Any) -> tuning.Products | None:
    """`_measured`, where all weights are on one device."""
    products = _measured(weights, jnp.float32)
    is_one = all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(weights))
    return products if is_one else None


def _measured(weights: Any, kv_dtype: Any) -> tuning.Products | None:
    """What a table says of float32 products, if they are all a step computes, and on a CPU."""
    leaves = jax.tree.leaves(weights)
    device = next(iter(leaves[0].sharding.device_set))
    dtypes = {leaf.dtype for leaf in leaves} | {jnp.dtype(kv_dtype)}
    if device.platform != "cpu" or dtypes != {jnp.dtype("float32")}:
        return None
    return tuning.tuned_products("float32")
