"""Block sizes of the XLA path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from octavo.pallas_kernels.tuning import CPU, tuning_device, tuning_key, with_tuned

CACHE_BYTES = 1 << 20
"""What a block's keys and values may take, gathered: with what else is at hand, a core's L2."""
DEVICE_BLOCK_BYTES = 128 << 20
"""What a block's keys and values, or its scores, may take on a GPU or TPU. Each operation of a
block starts a kernel there, so that a small block takes as long as those starts do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XlaTiles:
    """Block sizes.

    Attributes:
        row_group: decode rows that share a gather and a product.
        decode_block: keys of a decode block, in whole pages.
        score_sums: 1 takes decode rows' scores by multiplying and summing in a loop, 0 as products.
        native_decode: 1 has one native function compute decode rows, as `cpu/native_attention` does
            on a CPU for the pools it takes; 0 has them computed as above.
        query_tile: queries of a prefill tile.
        prefill_block: keys of a prefill block, in whole pages.
        tail: keys, at least, of the smaller blocks that what whole blocks leave over is walked in.
    """

    row_group: int = 8
    decode_block: int = 64
    score_sums: int = 0
    native_decode: int = 1
    query_tile: int = 32
    prefill_block: int = 64
    tail: int = 32


def default_xla_tiles(num_kv_heads: int, head_dim: int) -> XlaTiles:
    """Rows of a decode group until its gathered block, in float32, fills the cache."""
    tiles = XlaTiles()
    row_bytes = 2 * tiles.decode_block * num_kv_heads * head_dim * 4
    return replace(tiles, row_group=max(1, min(tiles.row_group, CACHE_BYTES // row_bytes)))


def device_xla_tiles(num_heads: int, num_kv_heads: int, head_dim: int) -> XlaTiles:
    """The computed sizes of a GPU or TPU: powers of two that `DEVICE_BLOCK_BYTES` holds."""
    block, key_bytes = 1024, 2 * num_kv_heads * head_dim * 4

    def fitting(bytes_each: int, most: int) -> int:
        fits = max(1, min(most, DEVICE_BLOCK_BYTES // bytes_each))
        return 1 << (fits.bit_length() - 1)

    rows = fitting(64 * key_bytes, 32)
    return XlaTiles(
        row_group=rows,
        decode_block=fitting(rows * key_bytes, block),
        native_decode=0,
        query_tile=fitting(num_heads * block * 4, 512),
        prefill_block=block,
        tail=256,
    )


def choose_xla_tiles(
    q_shape: tuple[int, ...], q_dtype: Any, pool_shape: tuple[int, ...], kv_dtype: Any
) -> XlaTiles:
    """Measured block sizes where a table has them, else the computed default.

    Args:
        q_shape: [T, Hq, D].
        pool_shape: [N, 2, Hkv, P, D].
    """
    is_cpu = tuning_device().startswith(CPU)
    if is_cpu:
        tiles = default_xla_tiles(pool_shape[2], pool_shape[4])
    else:
        tiles = device_xla_tiles(q_shape[1], pool_shape[2], pool_shape[4])
    for part in ("decode", "prefill"):
        key = tuning_key("xla", part, q_shape, jnp.dtype(q_dtype), pool_shape, kv_dtype)
        tiles = with_tuned(tiles, key)
    # Only CPUs have native functions.
    return tiles if is_cpu else replace(tiles, native_decode=0)
