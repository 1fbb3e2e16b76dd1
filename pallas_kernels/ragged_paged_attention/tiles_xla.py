"""Block sizes of the XLA path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from octavo.pallas_kernels.tuning import CPU, tuning_device, tuning_key, with_tuned

CACHE_BYTES = 1 << 20
"""What a block's keys and values may take, gathered: with what else is at hand, a core's L2."""


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
    """

    row_group: int = 8
    decode_block: int = 64
    score_sums: int = 0
    native_decode: int = 1
    query_tile: int = 32
    prefill_block: int = 64


def default_xla_tiles(num_kv_heads: int, head_dim: int) -> XlaTiles:
    """Rows of a decode group until its gathered block, in float32, fills the cache."""
    tiles = XlaTiles()
    row_bytes = 2 * tiles.decode_block * num_kv_heads * head_dim * 4
    return replace(tiles, row_group=max(1, min(tiles.row_group, CACHE_BYTES // row_bytes)))


def choose_xla_tiles(
    q_shape: tuple[int, ...], q_dtype: Any, pool_shape: tuple[int, ...], kv_dtype: Any
) -> XlaTiles:
    """Measured block sizes where a table has them, else the computed default.

    Only CPUs have `native_decode`: elsewhere its loops would run one operation at a time.

    Args:
        q_shape: [T, Hq, D].
        pool_shape: [N, 2, Hkv, P, D].
    """
    tiles = default_xla_tiles(pool_shape[2], pool_shape[4])
    for part in ("decode", "prefill"):
        key = tuning_key("xla", part, q_shape, jnp.dtype(q_dtype), pool_shape, kv_dtype)
        tiles = with_tuned(tiles, key)
    return tiles if tuning_device().startswith(CPU) else replace(tiles, native_decode=0)
